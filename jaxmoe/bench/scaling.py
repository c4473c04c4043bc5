"""`python -m jaxmoe.bench scaling`: what a layer over many hosts moves and how long that takes, by a model of cost.

Bytes are those of `jaxmoe.explain`, which tests count in programs. Times are bytes over rates: those of NVLink and of
products were measured on H200s (docs/performance.md), that of the network is 400 Gb/s for each GPU. docs/scaling.md has
what this prints.
"""

import dataclasses
import math
from collections.abc import Iterator

from jaxmoe.bench.shapes import SHAPES, LayerShape
from jaxmoe.implementations.base import Shape
from jaxmoe.implementations.megakernel.explain import wire_bytes
from jaxmoe.implementations.megakernel.plan_defaults import kernel_plan
from jaxmoe.network import choice
from jaxmoe.network.cost import NETWORK_BYTES_PER_SECOND, launches, network_bytes, share_of_host
from jaxmoe.network.levels import Levels
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.sharding import ExpertGroup

TOKENS = 4096
RANKS_PER_HOST = 8
# What a rank pulls while its peers do too, and what products of large and of small experts sustain.
NVLINK_BYTES_PER_SECOND = 335e9
LARGE_EXPERTS, LARGE_FLOPS, SMALL_FLOPS = 4096, 640e12, 450e12
HOSTS = (1, 2, 4, 8, 16, 32, 64)
MODELS = ("mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2")
# Of DeepSeek-V3: the experts of a token are in at most so many of so many groups (arXiv:2412.19437, section 2.1.2).
GROUPS, CHOSEN_GROUPS = 8, 4
GROUP_LIMITED = ("deepseek-v3",)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line: a model on so many hosts, forward pass, each rank.

    Args:
      model: its name.
      hosts: over which its experts are.
      ranks: that share the experts.
      limited: whether tokens choose experts of `CHOSEN_GROUPS` groups only.
      share: of the tokens that have an expert on one host.
      plan: between hosts; `None` on one host.
      gather_bytes: received from other hosts if tokens go to all of them.
      send_bytes: received if they go to those that need them, in the rounds of the default plan of that way.
      nvlink_bytes: received from ranks of the same host.
      flops: of the products.
    """

    model: str
    hosts: int
    ranks: int
    limited: bool
    share: float
    plan: NetworkPlan | None
    gather_bytes: int
    send_bytes: int
    nvlink_bytes: int
    flops: int
    intermediate: int

    @property
    def network_seconds(self) -> float:
        """Of the way that the plan takes."""
        sent = self.plan is not None and self.plan.way == "send"
        return (self.send_bytes if sent else self.gather_bytes) / NETWORK_BYTES_PER_SECOND

    @property
    def nvlink_seconds(self) -> float:
        """If nothing else used the links."""
        return self.nvlink_bytes / NVLINK_BYTES_PER_SECOND

    @property
    def product_seconds(self) -> float:
        """At the rate that products of such experts sustain in the layer."""
        return self.flops / (LARGE_FLOPS if self.intermediate >= LARGE_EXPERTS else SMALL_FLOPS)


def rows(tokens: int = TOKENS) -> Iterator[Row]:
    """Yields the lines of the table.

    Args:
      tokens: per rank.
    """
    for model in MODELS:
        shape = SHAPES[model]
        for limited in (False, True) if model in GROUP_LIMITED else (False,):
            for hosts in HOSTS:
                # Where there are fewer experts than ranks, hosts have as many of the ranks as there are experts for.
                ranks = min(hosts * RANKS_PER_HOST, shape.num_experts)
                if ranks % hosts or shape.num_experts % ranks:
                    continue
                yield _row(model, shape, tokens, hosts, ranks, limited)


def _row(model: str, of_model: LayerShape, tokens: int, hosts: int, ranks: int, limited: bool) -> Row:
    shape = Shape(
        tokens=tokens,
        hidden=of_model.hidden,
        intermediate=of_model.intermediate,
        num_experts=of_model.num_experts,
        top_k=of_model.top_k,
        ranks=ranks,
    )
    share = group_limited_share(shape, hosts) if limited else share_of_host(shape, hosts)
    plan, launch, number = None, shape, 1
    gather = send = 0
    if hosts > 1:
        plan = choice.complete(None, shape, hosts)
        sending = choice.complete(NetworkPlan(way="send"), shape, hosts)
        assert sending.round_tokens is not None
        rounds = math.ceil(share * tokens / sending.round_tokens)
        gather = network_bytes(shape, hosts, tokens)
        send = network_bytes(shape, hosts, rounds * sending.round_tokens)
        number = rounds if plan.way == "send" else launches(shape, hosts, plan)
        across = ExpertGroup(("host",), hosts)
        launch = choice.shape_on_host(shape, Levels(ExpertGroup(), across, plan))
        if limited:  # as many slots in other launches
            launch = dataclasses.replace(launch, used_slots=tokens / (number * launch.tokens))
    return Row(
        model,
        hosts,
        ranks,
        limited,
        share,
        plan,
        gather,
        send,
        number * wire_bytes(launch, kernel_plan(launch, "gpu")),
        shape.flops,
        shape.intermediate,
    )


def group_limited_share(shape: Shape, hosts: int) -> float:
    """Returns the share of tokens that have an expert on one host, where each chooses its experts from some groups.

    Each set of `CHOSEN_GROUPS` of `GROUPS` is as likely as another, and so is each set of experts of the chosen groups.

    Args:
      shape: of the whole group of ranks.
      hosts: of it; they have whole groups of experts, or groups are on several hosts.

    >>> deepseek = Shape(tokens=1, hidden=1, intermediate=1, num_experts=256, top_k=8)
    >>> [round(group_limited_share(deepseek, hosts), 3) for hosts in (2, 8, 32)]
    [0.963, 0.454, 0.206]
    """
    of_group, of_host = shape.num_experts // GROUPS, shape.num_experts // hosts
    candidates = CHOSEN_GROUPS * of_group
    groups_of_host = max(GROUPS // hosts, 1)
    share = 0.0
    for chosen in range(1, min(groups_of_host, CHOSEN_GROUPS) + 1):
        ways = math.comb(groups_of_host, chosen) * math.comb(GROUPS - groups_of_host, CHOSEN_GROUPS - chosen)
        here = min(chosen * of_group, of_host)
        none = math.comb(candidates - here, shape.top_k) / math.comb(candidates, shape.top_k)
        share += ways / math.comb(GROUPS, CHOSEN_GROUPS) * (1 - none)
    return share


HEADER = (
    "model", "hosts", "ranks", "routing", "tokens a host needs", "gather MB", "send MB", "way", "network ms",
    "NVLink ms", "products ms",
)  # fmt: skip


def table(tokens: int = TOKENS) -> str:
    """Returns the lines as a table of Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *(_cells(row) for row in rows(tokens))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    several = row.hosts > 1
    return (
        row.model,
        str(row.hosts),
        str(row.ranks),
        "group-limited" if row.limited else "uniform",
        f"{100 * row.share:.0f} %",
        f"{row.gather_bytes / 1e6:.0f}" if several else "-",
        f"{row.send_bytes / 1e6:.0f}" if several else "-",
        row.plan.way or "-" if row.plan else "-",
        f"{1e3 * row.network_seconds:.2f}",
        f"{1e3 * row.nvlink_seconds:.2f}",
        f"{1e3 * row.product_seconds:.2f}",
    )


def main() -> int:
    """Prints the table; returns the exit status."""
    print(table())
    return 0
