"""Bytes and time of tokens between hosts, under uniform routing: for the choice of a plan, and for `explain`.

The rates are those of a usual cluster, not measured here; docs/scaling.md says what follows from them.
"""

import math

from jaxmoe.implementations.base import Shape
from jaxmoe.network.plan import NetworkPlan

# 400 Gb/s for each GPU, each way.
NETWORK_BYTES_PER_SECOND = 50e9
# What a launch takes besides its products, before the first and behind the last of them, and what the gradients of
# experts take that are a sum over launches: written and read again in float32. Together they are what a second chunk of
# mixtral-8x7b costs on 2 x H200 (docs/performance.md); how much of it is what is a guess.
FORWARD_LAUNCH_SECONDS, BACKWARD_LAUNCH_SECONDS = 200e-6, 700e-6
SUM_BYTES, MEMORY_BYTES_PER_SECOND = 8, 4e12
# An id and a routing weight.
SLOT_BYTES = 8
# The first and the last one stand outside of the loop over the others.
FEWEST_ROUNDS = 2


def share_of_host(shape: Shape, hosts: int) -> float:
    """Returns the share of tokens that have an expert on one host, if all sets of `top_k` experts are as likely.

    >>> round(share_of_host(Shape(tokens=1, hidden=1, intermediate=1, num_experts=256, top_k=8), hosts=8), 3)
    0.662
    """
    others = shape.num_experts - shape.num_experts // hosts
    return 1 - math.comb(others, shape.top_k) / math.comb(shape.num_experts, shape.top_k)


def network_bytes(shape: Shape, hosts: int, tokens: int) -> int:
    """Returns what a rank receives from other hosts in a forward pass, and sends to them.

    Args:
      shape: of the whole group.
      hosts: of the group.
      tokens: that a rank sends each host: all of its tokens, or those of its rounds.
    """
    # Tokens go with their slots, answers come back. Both have the dtype of x.
    of_token = 2 * shape.answer_bytes + SLOT_BYTES * shape.top_k
    return (hosts - 1) * tokens * of_token


def training_seconds(shape: Shape, hosts: int) -> tuple[float, float]:
    """Returns how long the bytes of a training step travel, and what each further launch of its passes costs.

    A backward pass gathers gradients of outputs and sends back those of tokens: as many bytes as a forward pass.
    """
    travel = 2 * network_bytes(shape, hosts, shape.tokens) / NETWORK_BYTES_PER_SECOND
    weights = shape.local_experts * (shape.projections + 1) * shape.hidden * shape.intermediate
    sums = SUM_BYTES * weights / MEMORY_BYTES_PER_SECOND
    return travel, FORWARD_LAUNCH_SECONDS + BACKWARD_LAUNCH_SECONDS + sums


def launches(shape: Shape, hosts: int, plan: NetworkPlan) -> int:
    """Returns the launches of a forward pass under uniform routing: chunks, each with its rounds, of `"send"`."""
    assert plan.chunks is not None
    if plan.round_tokens is None:
        return plan.chunks
    of_chunk = share_of_host(shape, hosts) * shape.tokens / plan.chunks
    return plan.chunks * max(math.ceil(of_chunk / plan.round_tokens), FEWEST_ROUNDS)


def sent_tokens(shape: Shape, hosts: int, plan: NetworkPlan) -> int:
    """Returns the tokens that a rank sends each host under uniform routing, with the unused places of rounds."""
    return shape.tokens if plan.round_tokens is None else launches(shape, hosts, plan) * plan.round_tokens
