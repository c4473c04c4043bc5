"""How the library's pytrees are registered, once for all of them."""

import dataclasses
import typing
from typing import TypeVar

import jax

Class = TypeVar("Class", bound=type)


@typing.dataclass_transform(frozen_default=True)
def pytree(cls: Class) -> Class:
    """Makes a class a frozen dataclass that is a pytree of its fields and can be part of a `jax.export` signature.

    The fields are left out of the run-time type checks of the tests, because JAX rebuilds pytrees around things that
    are no arrays (partition specs, placeholders). `experts.check` checks `Experts` at every call of `moe_layer`.
    """
    frozen = typing.no_type_check(dataclasses.dataclass(frozen=True)(cls))
    registered = jax.tree_util.register_dataclass(frozen)
    jax.export.register_pytree_node_serialization(
        registered,
        serialized_name=f"jaxmoe.{cls.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
    return registered
