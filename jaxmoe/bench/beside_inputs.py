"""The arrays of the programs of `python -m jaxmoe.bench beside`: random weights of all their layers, and tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench.beside_layer import Inputs
from jaxmoe.bench.beside_programs import DENSE_LAYERS, DENSE_WIDENING
from jaxmoe.bench.inputs import AXIS, quantized
from jaxmoe.bench.shapes import LayerShape
from jaxmoe.four_bit import marked


def init_experts(shape: LayerShape, dtype: Any, block: str | None, key: Any) -> jaxmoe.Experts:
    """Returns random experts of a layer, quantised where `block` says to what."""
    wide = jaxmoe.Experts.init(key, shape.num_experts, shape.hidden, shape.intermediate, dtype=dtype)
    return wide if block is None else quantized(wide, block)


def shapes_of_experts(shape: LayerShape, dtype: Any, block: str | None, *, through_e4m3: bool) -> jaxmoe.Experts:
    """Returns what `init_experts` would make, without numbers, or what `jaxmoe.through_e4m3` would of that."""
    experts = jax.eval_shape(functools.partial(init_experts, shape, dtype, block), jax.random.key(0))
    return marked(experts, through_e4m3=True) if through_e4m3 else experts


def make_weights(
    mesh: Mesh, shape: LayerShape, dtype: Any, block: str | None, *, through_e4m3: bool = False
) -> Callable[..., Inputs]:
    """Returns a function from tokens to inputs; the arguments are those of `init_experts`, and of `random_experts`.

    Raises:
      ValueError: the dense layers cannot be split over the ranks.
    """
    ranks = mesh.shape[AXIS]
    if shape.hidden % ranks:
        raise ValueError(
            f"hidden={shape.hidden}, by which weights of dense layers are split and activations exchanged, cannot be "
            f"spread over {ranks} ranks. Choose a multiple of {ranks}."
        )
    split, everywhere = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
    width = DENSE_WIDENING * shape.hidden

    def make(key: jax.Array) -> tuple[Any, Any, Any]:
        def normal(number: int, *sizes: int) -> jax.Array:
            numbers = jax.random.normal(jax.random.fold_in(key, number), sizes, jnp.float32)
            return (numbers * sizes[0] ** -0.5).astype(dtype)

        experts = tuple(init_experts(shape, dtype, block, jax.random.fold_in(key, number)) for number in range(2))
        dense = tuple(
            (normal(2 * layer, shape.hidden, width), normal(2 * layer + 1, width, shape.hidden))
            for layer in range(1, 1 + DENSE_LAYERS)
        )
        return normal(0, shape.hidden, shape.num_experts), experts, dense

    router, experts, dense = jax.jit(make, out_shardings=(everywhere, split, split))(jax.random.key(1))
    if through_e4m3:
        experts = tuple(jaxmoe.through_e4m3(each) for each in experts)
    return functools.partial(Inputs, router=router, experts=experts, dense=dense)


def make_tokens(sharding: NamedSharding, sizes: tuple[int, int], dtype: Any) -> jax.Array:
    """Returns random tokens."""
    make = jax.jit(lambda key: jax.random.normal(key, sizes, jnp.float32).astype(dtype), out_shardings=sharding)
    return make(jax.random.key(0))
