"""The plan of what travels between hosts: what may be chosen. `choice.py` chooses where the user does not."""

import dataclasses
from typing import Literal

from jaxmoe.integers import integer

Way = Literal["gather", "send"]
WAYS: tuple[Way, ...] = ("gather", "send")


@dataclasses.dataclass(frozen=True)
class NetworkPlan:
    """How tokens get to experts on other hosts, `moe_layer(..., network=...)`. Whatever is `None` is chosen.

    Outputs differ between plans by rounding alone: an answer is rounded to the dtype of `x` once for each host that has
    experts of the token. Equal plans give equal bits.

    Args:
      ranks_per_host: how many ranks that follow each other in a group, first axis of `axis_name` slowest, reach each
        other's memory. `None`: as the devices of the mesh say; where those are not known, or several processes of CPUs,
        all of a group. A group of no more ranks than this has one host, and nothing else of the plan is used.
      way: `"gather"`: every rank gets the tokens of all ranks of its place on other hosts, and sends back one sum for
        each. `"send"`: a token goes to the hosts that have one of its experts, once to each.
      chunks: parts into which the tokens of a rank are cut. What one needs can travel while another is computed; each
        is a launch of its own. Of `"gather"` memory shrinks with it.
      round_tokens: of `"send"`, the most tokens that a rank sends a host in a round. Rounds have this size whether it
        is used or not. There are as many as the routing needs, and at least two, so that no token is dropped and memory
        is bounded. What one needs travels while another is computed.
      reasons: why, one sentence per choice; not compared.

    >>> NetworkPlan(ranks_per_host=8, way="gather", chunks=2).chunks
    2
    """

    ranks_per_host: int | None = None
    way: Way | None = None
    chunks: int | None = None
    round_tokens: int | None = None
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("ranks_per_host", "chunks", "round_tokens"):
            given = getattr(self, name)
            if given is None:
                continue
            value = integer(given)
            if value is None or value < 1:
                raise ValueError(f"NetworkPlan: {name}={given!r} must be an integer of at least 1, or None.")
            object.__setattr__(self, name, value)
        if self.way is not None and self.way not in WAYS:
            raise ValueError(f"NetworkPlan: way={self.way!r} must be one of {', '.join(map(repr, WAYS))}, or None.")
