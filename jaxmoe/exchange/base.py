"""What every implementation of a dispatch and a combine is given."""

import dataclasses
from typing import Any, NamedTuple

import jax

from jaxmoe.sharding import Placement


@dataclasses.dataclass(frozen=True)
class Room:
    rows: int
    alignment: int = 1
    capacity_per_expert: int = 0


@dataclasses.dataclass(frozen=True)
class ExchangeShape:
    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    ranks: int
    dtype: Any

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.ranks


@dataclasses.dataclass(frozen=True)
class ExchangeCall:
    implementation: str
    implementation_reason: str = dataclasses.field(compare=False)
    placement: Placement
    platform: str
    shape: ExchangeShape
    room: Room
    precision: Any = None


class Routes(NamedTuple):
    row_sources: jax.Array
    slot_rows: jax.Array


class Arrived(NamedTuple):
    rows: jax.Array
    scales: jax.Array | None
    rows_per_expert: jax.Array
    dropped_rows: jax.Array
    routes: Routes
