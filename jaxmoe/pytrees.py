"""How the library's pytrees are registered, once for all of them."""

import dataclasses
import json
import typing
from typing import Any, TypeVar

import jax
import numpy as np

Class = TypeVar("Class", bound=type)


def _equal(self: Any, other: Any) -> bool:
    if type(self) is not type(other):
        return False
    names = [field.name for field in dataclasses.fields(self)]
    return all(_same(getattr(self, name), getattr(other, name)) for name in names)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return not any(isinstance(each, jax.Array | np.ndarray) for each in (one, other)) and bool(one == other)


@typing.dataclass_transform(frozen_default=True)
def local_pytree(cls: Class) -> Class:
    """Makes a class a frozen dataclass that is a pytree of its fields, for use within one process.

    Fields that are no arrays say so: `dataclasses.field(metadata={"static": True})`. They are hashable.

    Two of them are equal if their fields are, and arrays if they are the same array: what they hold is not looked at,
    so that a comparison has an answer under `jit` as well.

    The fields are left out of the run-time type checks of the tests, because JAX rebuilds pytrees around things that
    are no arrays (partition specs, placeholders). `expert_checks.check` checks `Experts` at every call of `moe_layer`.
    """
    frozen = typing.no_type_check(dataclasses.dataclass(frozen=True, eq=False)(cls))
    frozen.__eq__, frozen.__hash__ = _equal, None
    return jax.tree_util.register_dataclass(frozen)


@typing.dataclass_transform(frozen_default=True)
def pytree(cls: Class) -> Class:
    """Makes a class a `local_pytree` that can also be part of a `jax.export` signature: static fields are numbers
    or text.
    """
    registered = local_pytree(cls)
    jax.export.register_pytree_node_serialization(
        registered,
        serialized_name=f"jaxmoe.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )
    return registered
