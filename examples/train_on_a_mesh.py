"""Trains a small Mixture-of-Experts decoder on a mesh of four axes: FSDP, context, tensor and expert parallelism.

    python examples/train_on_a_mesh.py
    python examples/train_on_a_mesh.py --fsdp=1 --context=2 --axis-types=explicit
    python examples/train_on_a_mesh.py --steps=20 --checkpoint=/tmp/run
    python examples/train_on_a_mesh.py --steps=30 --checkpoint=/tmp/run --fsdp=4 --tensor=1    # goes on at step 20

What each axis splits (docs/recipe.md says what is sent along it):

    axis      tokens [batch, seq, hidden]   experts [experts, hidden, intermediate]   attention [hidden, heads, width]
    fsdp      batch                         hidden                                    hidden
    context   seq
    tensor                                  intermediate                              heads
    expert    batch                         experts
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import app, flags, logging
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

import jaxmoe
from jaxmoe.nnx import MoE, MoEAux
from jaxmoe.testing import use_virtual_devices

# Ranks along the last axes are nearest to each other. There every layer sends tokens (expert) and adds up (tensor), for
# which nothing else can go on; weights, which travel along fsdp, can be on their way while something is computed.
AXES = ("fsdp", "context", "tensor", "expert")
# Ranks along fsdp and along expert have different sequences, so that outside of the experts none repeats what another
# computes. Ranks along context have parts of the same sequences, ranks along tensor the same tokens.
BATCH = ("fsdp", "expert")
TOKENS = P(BATCH, "context")
# Layers are stacked along a first dimension, which no axis splits: a step of the scan is one layer on all ranks.
STACKED: dict[str, Any] = {"transform_metadata": {nnx.PARTITION_NAME: None}}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of a batch."""

    vocabulary: int = 32
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 64
    batch: int = 16
    length: int = 32
    dtype: Any = jnp.bfloat16  # to compute in; parameters and their moments are float32


def axes_are_explicit() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def put(array: jax.Array, *axes: Any) -> jax.Array:
    """Splits an array over these mesh axes, whether they are Auto or Explicit."""
    return (jax.reshard if axes_are_explicit() else jax.lax.with_sharding_constraint)(array, P(*axes))


def as_tokens() -> P | None:
    """Where a result lies if the types of its operands leave that open. With Auto axes the compiler chooses."""
    return P(*TOKENS, None) if axes_are_explicit() else None


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], fan_in: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5, out_sharding=axes)


def norm(x: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq hidden"]:
    """Scales every token to unit mean square, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


class Attention(nnx.Module):
    """Each token looks at itself and at those before it."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        hidden, heads, width = config.hidden, config.heads, config.hidden // config.heads
        # Heads know nothing of each other: tensor splits them as it does the intermediate dimension of experts.
        into = (hidden, heads, width), ("fsdp", "tensor", None), hidden
        self.query, self.key, self.value = (weight(rngs, *into) for _ in range(3))
        self.out = weight(rngs, (heads, width, hidden), ("tensor", None, "fsdp"), hidden)

    def __call__(self, x: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq hidden"]:
        def project(kernel: nnx.Param[jax.Array]) -> jax.Array:
            # FSDP: gathered where it is used, in the dtype of use. The gradient of that is a sum, of which each rank
            # keeps its part.
            return jnp.einsum("bsh,hnw->bsnw", x, put(kernel[...].astype(x.dtype), None, "tensor", None))

        # Queries stay with their tokens; keys and values of whole sequences come to every rank along context.
        query = project(self.query)
        key, value = (put(project(kernel), BATCH, None, "tensor", None) for kernel in (self.key, self.value))
        scores = jnp.einsum("bqnw,bknw->bnqk", query, key, preferred_element_type=jnp.float32)
        mask = put(jnp.where(jnp.tri(x.shape[1], dtype=bool), 0.0, -jnp.inf), "context", None)  # [queries, keys]
        share = jax.nn.softmax(scores * query.shape[-1] ** -0.5 + mask, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bnqk,bknw->bqnw", share, value)
        # Each rank along tensor has heads of its own: what they say is added up.
        out = put(self.out[...].astype(x.dtype), "tensor", None, None)
        return jnp.einsum("bqnw,nwh->bqh", mixed, out, out_sharding=as_tokens())


class Block(nnx.Module):
    """One layer: attention, then experts."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.attention = Attention(config, rngs)
        self.moe = MoE(
            config.hidden,
            config.intermediate,
            config.experts,
            jaxmoe.RouterConfig(top_k=config.top_k),
            axis_name="expert",  # tokens travel along it, to the ranks of their experts, and back
            data_axes=TOKENS,  # the layer takes tokens as they lie here, and leaves them there
            hidden_axis="fsdp",  # its ranks have different tokens: they gather the experts
            intermediate_axis="tensor",  # its ranks have the same: each computes its part
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, h: Float[Array, "batch seq hidden"]) -> tuple[Float[Array, "batch seq hidden"], MoEAux]:
        h = h + self.attention(norm(h))
        y, aux = self.moe(norm(h))
        return put(h + y, *TOKENS, None), aux


class Decoder(nnx.Module):
    """Predicts the next token. Positions are learned."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        create_all = nnx.vmap(lambda rngs: Block(config, rngs), **STACKED)
        self.dtype = config.dtype
        self.embedding = weight(rngs, (config.vocabulary, config.hidden), (None, "fsdp"), 1)
        self.positions = weight(rngs, (config.length, config.hidden), (None, "fsdp"), 1)
        self.blocks = nnx.split_rngs(splits=config.layers)(create_all)(rngs)
        self.head = weight(rngs, (config.hidden, config.vocabulary), ("fsdp", None), config.hidden)

    def __call__(self, tokens: Int32[Array, "batch seq"]) -> tuple[Float[Array, "batch seq vocabulary"], MoEAux]:
        """Returns the logits of the token behind each, in float32, and what the layers say about their routing."""
        embedding, head = (put(each[...].astype(self.dtype), None, None) for each in (self.embedding, self.head))
        positions = put(self.positions[...].astype(self.dtype), "context", None)
        # One program for all layers. The backward pass computes each again, which gathers its weights again, so that in
        # between a rank keeps nothing of a layer but its tokens. A scan needs no barrier between the two passes, and on
        # GPUs it would make XLA copy the weights of every layer.
        one = nnx.remat(lambda block, h: block(h), prevent_cse=False)
        run = nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), **STACKED)
        h, aux = run(self.blocks, embedding.at[tokens].get(out_sharding=as_tokens()) + positions)
        return jnp.einsum("bsh,hv->bsv", norm(h), head, preferred_element_type=jnp.float32), aux


class Trainer:
    """A model in training on a mesh, which has to be set; its state are parameters, and the optimizer's moments."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh, self.optimizer = config, mesh, optax.adamw(3e-3)

        def create() -> Any:
            parameters = nnx.state(Decoder(config, nnx.Rngs(0)))
            return parameters, self.optimizer.init(parameters)

        self.graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
        shapes = jax.eval_shape(create)
        # Of every parameter and its moments, as written where it was made. Said of what `create` and `step` return, it
        # makes the compiler draw, add up and update on each rank what lies there, and nothing else.
        shardings = nnx.get_named_sharding(shapes, mesh)
        self.shapes = jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), shapes, shardings)
        self.create = jax.jit(create, out_shardings=shardings)
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))

    def _loss(self, parameters: Any, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, Any]:
        logits, aux = nnx.merge(self.graph, parameters)(tokens)
        loss = -(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, logits.shape[-1])).sum(-1).mean()
        balance, rows = aux.load_balancing_loss.mean(), aux.stats.rows_per_expert  # 1 is even; [layers, experts]
        return loss + 0.01 * balance, (loss, balance, rows)

    def _step(self, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, Any]:
        parameters, moments = state
        gradients, metrics = jax.grad(self._loss, has_aux=True)(parameters, tokens, targets)
        updates, moments = self.optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), metrics

    def batch(self, step: int) -> list[jax.Array]:
        """Returns tokens, and those behind them: each sequence counts on by 1, 2 or 3, and only its past says which."""
        rng, config = np.random.default_rng(step), self.config  # a run that goes on elsewhere sees the same
        first, stride = rng.integers(config.vocabulary, size=config.batch), rng.integers(1, 4, size=config.batch)
        counted = (first[:, None] + stride[:, None] * np.arange(config.length + 1)) % config.vocabulary
        at = NamedSharding(self.mesh, TOKENS)
        return [jax.device_put(each.astype(np.int32), at) for each in (counted[:, :-1], counted[:, 1:])]


def save(directory: Path, step: int, state: Any) -> None:
    with ocp.CheckpointManager(directory.resolve()) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))


def restore(directory: Path, trainer: Trainer) -> tuple[int, Any]:
    """Returns the latest state, split over the trainer's mesh, whatever mesh it was saved from; else a new one."""
    with ocp.CheckpointManager(directory.resolve()) as manager:
        step = manager.latest_step()
        at = ocp.args.StandardRestore(trainer.shapes)
        return (0, trainer.create()) if step is None else (step, manager.restore(step, args=at))


def mesh_of(sizes: Sequence[int], axis_types: str) -> Mesh:
    kinds, devices = (AxisType[axis_types.title()],) * len(AXES), jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(tuple(sizes), AXES, axis_types=kinds, devices=devices)


def define_flags() -> None:
    for name, size in zip(AXES, (2, 1, 2, 2), strict=True):
        flags.DEFINE_integer(name, size, f"size of mesh axis {name}", lower_bound=1)
    flags.DEFINE_enum("axis_types", "auto", ("auto", "explicit"), "who says where arrays lie: compiler or types")
    flags.DEFINE_integer("steps", 30, "step at which the run ends", lower_bound=1)
    flags.DEFINE_string("checkpoint", None, "folder: goes on with what is there, and saves there at the end")


def main(_: Sequence[str]) -> None:
    given = flags.FLAGS
    logging.set_verbosity(logging.WARNING)  # absl would show what orbax logs for its developers
    sizes = [getattr(given, name) for name in AXES]
    use_virtual_devices(math.prod(sizes))  # of JAX's CPU backend, which stays unused where there is another
    mesh = mesh_of(sizes, given.axis_types)
    with jax.set_mesh(mesh):
        trainer = Trainer(Config(), mesh)
        first, state = restore(Path(given.checkpoint), trainer) if given.checkpoint else (0, trainer.create())
        print("step   loss  balance  tokens of the fullest expert")
        for step in range(first, given.steps):
            state, (loss, balance, rows) = trainer.step(state, *trainer.batch(step))
            if step % 5 == 0 or step == given.steps - 1:
                print(f"{step:4}  {loss:5.3f}  {balance:7.3f}  {rows.max():6}")
        if given.checkpoint and first < given.steps:
            save(Path(given.checkpoint), given.steps, state)


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=lambda given: flags.FLAGS([each.replace("--axis-", "--axis_") for each in given]))
