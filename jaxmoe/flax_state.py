"""Experts, and what layers say of their routing, in `flax.serialization`: state dicts by the names of fields.

Without it `to_bytes` refuses what has one of them in it, and `from_state_dict` puts dicts in their place. `jaxmoe.nnx`
and `jaxmoe.linen` call `register` when they are imported.
"""

import dataclasses
import functools
from typing import Any

from flax import serialization

from jaxmoe.block_scaled import BlockScaled
from jaxmoe.experts import Experts, FusedExperts
from jaxmoe.four_bit import MXFP4, NVFP4
from jaxmoe.routing import MoEAux, MoEStats, Routing

# What models and training states keep, and intermediates of a layer.
CLASSES = (Experts, FusedExperts, BlockScaled, MXFP4, NVFP4, MoEStats, MoEAux, Routing)


@functools.cache
def register() -> None:
    """Tells `flax.serialization` of `CLASSES`."""
    for cls in CLASSES:
        names = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]
        to_state, from_state = functools.partial(_to_state, names), functools.partial(_from_state, names)
        serialization.register_serialization_state(cls, to_state, from_state)


def _to_state(names: list[str], given: Any) -> dict[str, Any]:
    return {name: serialization.to_state_dict(getattr(given, name)) for name in names}


def _from_state(names: list[str], target: Any, state: dict[str, Any]) -> Any:
    if missing := [name for name in names if name not in state]:
        raise ValueError(
            f"{type(target).__name__}: the stored state has no {', '.join(missing)}, but {', '.join(map(str, state))}. "
            "It was made of something else: restore it into what it was made of."
        )
    # Static fields, such as a layout, are those of the target.
    fields = {name: serialization.from_state_dict(getattr(target, name), state[name], name=name) for name in names}
    return dataclasses.replace(target, **fields)
