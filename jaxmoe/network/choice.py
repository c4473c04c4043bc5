"""The choices of the default plan between hosts, and the sizes that a plan gives the layer of one host.

`call.py` completes the user's plan here.
"""

import dataclasses
import math

from jaxmoe.implementations.base import Call, Shape
from jaxmoe.network.cost import (
    FEWEST_ROUNDS,
    NETWORK_BYTES_PER_SECOND,
    launches,
    network_bytes,
    share_of_host,
    training_seconds,
)
from jaxmoe.network.levels import Levels
from jaxmoe.network.plan import NetworkPlan, Way

# Up to so many bytes a gather is sent, which is one message where rounds are many.
SMALL_BYTES = 8 * 2**20
# Tokens are sent to the hosts that need them where that is at most this share of all, with rounds of that room over
# the tokens of uniform routing.
SEND_TO_SHARE, ROOM = 0.8, 1.1
# Rounds under uniform routing: tokens that go to fewer hosts (group-limited routing) take fewer.
ROUNDS = 4
# Shorter parts are not worth a launch.
FEWEST_CHUNK_TOKENS, MOST_CHUNKS = 512, 8


def complete(plan: NetworkPlan | None, shape: Shape, hosts: int) -> NetworkPlan:
    """Returns the plan with everything chosen that the user left open.

    Args:
      plan: of the user.
      shape: of the whole group, as one rank sees it.
      hosts: of the group, at least 2.
    """
    plan = plan or NetworkPlan()
    ranks_per_host = shape.ranks // hosts
    reasons = [f"ranks_per_host={ranks_per_host}: the {shape.ranks} ranks that share the experts are on {hosts} hosts"]
    way, reason = (plan.way, "") if plan.way else _way(shape, hosts)
    reasons += [reason] if reason else []
    chunks, reason = (plan.chunks, "") if plan.chunks else _chunks(shape, hosts, way)
    reasons += [reason] if reason else []
    chunks = min(chunks, max(shape.tokens, 1))
    round_tokens = None
    if way == "send":
        of_chunk = chunk_tokens(shape, chunks)
        round_tokens, reason = (plan.round_tokens, "") if plan.round_tokens else _round_tokens(shape, hosts, of_chunk)
        round_tokens = max(min(round_tokens, of_chunk), 1)
        reasons += [reason] if reason else []
    return NetworkPlan(ranks_per_host, way, chunks, round_tokens, tuple(reasons))


def chunk_tokens(shape: Shape, chunks: int) -> int:
    """Returns the tokens of a part of a rank's."""
    return -(-shape.tokens // chunks)


def shape_on_host(shape: Shape, levels: Levels) -> Shape:
    """Returns the sizes of one launch of the layer on a host, as one of its ranks sees them.

    Tokens of other hosts come too, and most of their slots name experts elsewhere. Places of rounds stay unused.
    """
    hosts, plan = levels.hosts, levels.plan
    assert plan.chunks is not None
    if plan.way == "gather":
        tokens = hosts * chunk_tokens(shape, plan.chunks)
    else:
        assert plan.round_tokens is not None
        tokens = hosts * plan.round_tokens
    # Under uniform routing as many slots name experts of a host as its ranks have, spread over all launches.
    used = shape.tokens / max(launches(shape, hosts, plan) * tokens, 1)
    return dataclasses.replace(
        shape,
        tokens=tokens,
        num_experts=shape.num_experts // hosts,
        ranks=shape.ranks // hosts,
        used_slots=min(used, 1.0),
    )


def call_on_host(call: Call) -> Call:
    """Returns the call of one launch among the ranks of a host; the call itself where there are no levels."""
    if call.levels is None:
        return call
    placement = dataclasses.replace(call.placement, group=call.levels.on_host)
    # Rounds keep nothing of the forward pass.
    residuals = "recompute" if call.levels.plan.way == "send" else call.residuals
    shape = shape_on_host(call.shape, call.levels)
    return dataclasses.replace(call, placement=placement, shape=shape, residuals=residuals, levels=None)


def _way(shape: Shape, hosts: int) -> tuple[Way, str]:
    share, of_all = share_of_host(shape, hosts), network_bytes(shape, hosts, shape.tokens)
    if of_all <= SMALL_BYTES:
        return "gather", f"way='gather': {of_all / 2**20:.3g} MiB for each rank, so that messages count and not bytes"
    told = f"a token has an expert on {100 * share:.0f} % of the {hosts} hosts"
    if ROOM * share > SEND_TO_SHARE:
        return "gather", f"way='gather': under uniform routing {told}, so it goes to all of them"
    return "send", f"way='send': under uniform routing {told}, and only those get it"


def _chunks(shape: Shape, hosts: int, way: Way) -> tuple[int, str]:
    if way == "send":
        return 1, "chunks=1: rounds cut the tokens into parts"
    # Of a training step: of n chunks a n-th of the bytes travels while nothing is computed, and each costs launches.
    travel, launch = training_seconds(shape, hosts)
    most = min(MOST_CHUNKS, max(shape.tokens // FEWEST_CHUNK_TOKENS, 1))
    wanted = min(max(round(math.sqrt(travel / launch)), 1), most)
    chunks = next(number for number in range(wanted, 0, -1) if shape.tokens % number == 0)
    return chunks, (
        f"chunks={chunks}: in a training step {1e3 * travel:.3g} ms of bytes at {NETWORK_BYTES_PER_SECOND / 1e9:.0f} "
        f"GB/s, which travel while another part is computed, and {1e3 * launch:.2g} ms for each part"
    )


def _round_tokens(shape: Shape, hosts: int, of_chunk: int) -> tuple[int, str]:
    expected = ROOM * share_of_host(shape, hosts) * of_chunk
    # What a launch has comes from all hosts.
    rounds = min(ROUNDS, max(int(hosts * expected) // FEWEST_CHUNK_TOKENS, FEWEST_ROUNDS))
    tokens = math.ceil(expected / rounds)
    return tokens, (
        f"round_tokens={tokens}: {rounds} rounds under uniform routing, fewer where tokens go to fewer hosts; each "
        "rank has room for that many of every host, and while they are computed those of the next round travel"
    )
