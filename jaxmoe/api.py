"""`moe_layer`: the signature, and from there to one of the implementations. Reads top to bottom like the maths.

The user calls it with a routing made by `routing.route` and weights in an `Experts`. Everything is checked before
anything runs (`call.py`), `shard_map` is entered where the caller has not (`sharding.py`), and each rank hands its
tokens to one of the implementations: `reference.py` (the truth), `xla/` (portable) or `megakernel/` (fused).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from jaxmoe import array_layout
from jaxmoe import call as calls
from jaxmoe.activation import ActivationLike
from jaxmoe.experts import AnyExperts, split
from jaxmoe.guard import not_differentiated, not_mapped
from jaxmoe.implementations import IMPLEMENTATIONS, AnyPlan
from jaxmoe.implementations.base import ARRIVED_NAME, CHECKPOINT_NAMES, Call, Inputs
from jaxmoe.jitted import jitted
from jaxmoe.network import layer as across_hosts
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.options import Accumulation, Arguments, CallOptions, ImplementationName, Precision, Residuals, as_jax
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.routing.router import Routing
from jaxmoe.routing.stats import MoEStats, int32_ids, load_stats


def moe_layer(
    x: Float[Array, "*batch hidden"],
    topk_ids: Integer[Array, "*batch top_k"] | Routing,
    topk_weights: Float[Array, "*batch top_k"] | AnyExperts | None = None,
    experts: AnyExperts | None = None,
    *,
    activation: ActivationLike = "silu",
    axis_name: str | Sequence[str] | None = "expert",
    data_axes: str | Sequence[str] | PartitionSpec | None = None,
    hidden_axis: str | Sequence[str] | None = None,
    intermediate_axis: str | Sequence[str] | None = None,
    token_valid: Bool[Array, "*batch"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    implementation: ImplementationName | None = None,
    plan: AnyPlan | None = None,
    residuals: Residuals | None = None,
    precision: Precision | None = None,
    accumulation: Accumulation = "promoted",
    network: NetworkPlan | None = None,
    return_stats: bool = False,
) -> Any:
    """Sends every token through its chosen experts and returns the weighted sum of what they answer.

    `y[t] = sum_k topk_weights[t, k] * expert(topk_ids[t, k])(x[t])`, where expert e computes
    `activation(x[t] @ w_gate[e], x[t] @ w_up[e]) @ w_down[e]`. No token is ever dropped. Differentiable in `x`,
    `topk_weights` and every array of `experts`; a `jax.checkpoint` policy can keep the values named
    `jaxmoe.CHECKPOINT_NAMES` (the inputs of the activation), so that the backward pass repeats no GEMM; the megakernel
    has them with `residuals="save"`. A `lax.scan` over layers keeps no copy of experts for its backward pass; around a
    layer in it use `jax.checkpoint(..., prevent_cse=False)`, whose barrier would else make XLA copy them in every turn.

    Inside `shard_map` with `axis_name` manual, all arguments are this rank's shards. Outside, under `jit` or not, with
    a mesh set by `jax.set_mesh` or passed as `mesh`, it enters `shard_map` itself, with experts split over `axis_name`
    and tokens over `axis_name` and all axes of their own. What dimension an axis splits follows from how `x` lies,
    where that is known, as `[batch, seq, hidden]` over `data` and `seq`; else it is the first that divides. Ranks for
    which none does (a decode batch of 3 on 8 ranks) take equal parts of the flattened tokens, filled up with some that
    have no expert.

    `moe_layer(x, routing, experts)`, with what `jaxmoe.route` returned, is `moe_layer(x, routing.topk_ids,
    routing.topk_weights, experts)`, and sees that the router chose among as many experts as there are.

    Args:
      x: tokens, bfloat16, float16, float32, or float64 on CPU; at least two dimensions.
      topk_ids: experts of each token, any integer type (of 64 bits that reach a program of `jax.jit` as its arguments
        JAX keeps 32, unless x64 is on). -1 is an unused slot; other values outside `[0, num_experts)`
        count as unused too and are reported in `MoEStats`. A token may name an expert twice: both count. Or a
        `jaxmoe.Routing`, behind which the experts come.
      topk_weights: float32 (or float64 with float64 tokens).
      experts: weights in the dtype of `x`; or in float32 where `x` is bfloat16 or float16: they are then cast to it in
        every call, and their gradients are float32, with the megakernel sums that are never rounded to 16 bits. With
        gate and up in one array: `jaxmoe.Experts.from_fused`. Or in
        8 or 4 bits (`jaxmoe.quantize`, or a checkpoint's arrays in `jaxmoe.BlockScaled`, `jaxmoe.MXFP4` or
        `jaxmoe.NVFP4`): those are constants, and asking for their gradients is an error.
      activation: `"silu"`, `"gelu"` (exact), `"gelu_tanh"`, `"relu"` or a `jaxmoe.SwiGLU`. Or an elementwise function
        of gate (`h = function(gate) * up`), or of gate and up: those of `jax.nn` with such names are taken for them,
        others run on `"xla"` and `"reference"`. Define it once, not in the call: see `jaxmoe.activation.resolve`. What
        it closes over is constant: outside of `jit` the values are those of the first call.
      axis_name: mesh axis, or axes, over which the experts are spread; `None` for no expert parallelism: `experts` are
        then all there are. Inside `shard_map` tokens should be split over it too, since every rank computes those it is
        given, and experts must be.
      data_axes: the other mesh axes over which tokens are split, where `moe_layer` enters `shard_map`; as a
        `PartitionSpec` of the leading dimensions of `x`, such as `P("data", "seq")`, it says which one each axis
        splits. `None`: the axes over which `x` lies. Those are known of Explicit axes, and of Auto axes outside of
        `jit`; inside of it, Auto axes have to be named. Ranks along all other axes repeat the work, and a
        `jaxmoe.RepeatedWorkWarning` says so, and what silences it; `()` says that it is meant of tokens. Inside
        `shard_map` it only says that ranks along `intermediate_axis` have different tokens.
      hidden_axis: mesh axis, or axes, over which the hidden dimension of the experts is split, for memory (FSDP): it is
        gathered in every call, and gradients are added up and scattered back. `None`: as the experts lie, known as for
        `data_axes`; with Auto axes inside of `jit`, what is not named is gathered, and gradients are split over
        `axis_name` alone. Inside `shard_map` experts that are split must be named.
      intermediate_axis: the same of the intermediate dimension. Over an axis that also splits tokens it is gathered.
        Over any other, each rank computes its part of it for the same tokens (tensor parallelism), and the partial
        outputs are added up once, in float32. Gradients inside `shard_map` then need its `check_vma`. Gate and up in
        halves (`jaxmoe.Experts.from_fused`) have no such parts: pass their `split()`.
      token_valid: `False` for padding: such a token takes no part (whatever it holds, NaN included), its output is
        zero.
      mesh: where none is set by `jax.set_mesh`. Inside `shard_map` it only says which devices share experts, which
        `implementation=None` asks where they are of several hosts. With Explicit axes take gradients under `jax.jit` or
        `jax.set_mesh`: JAX refuses others.
      implementation: `"megakernel"` (one call of compiled code per rank for each of the two passes), `"xla"`
        (portable), `"reference"` (dense, float32: the truth, slow), or `None` to choose: the megakernel on GPUs that
        can run the call and, as far as JAX and the driver say, reach each other's memory where they share experts; else
        `"xla"`. `jaxmoe.explain` says why. A named one runs or raises.
      plan: how to compute it, a `jaxmoe.Plan`, for `"megakernel"` a `jaxmoe.KernelPlan`; `None` is
        `jaxmoe.default_plan`.
      residuals: what the backward pass gets beside the inputs: `"save"` keeps the inputs of the activation, whose bytes
        `jaxmoe.explain` states, `"recompute"` computes them again; `None` is `"recompute"` for `"megakernel"` and
        `"save"` for `"xla"`. `"reference"` is differentiated by JAX and does not use it.
      precision: `"fp8"`: tokens before the first GEMM and h before the last are rounded to `float8_e4m3fn` with one
        float32 scale for each row and 128 columns, and multiplied with weights in 8 bits; the default with experts in 8
        bits. Wide experts are rounded in every call, in blocks of 128 x 128. `"fp8-e8m0"`: all these scales are powers
        of two, as with DeepSeek-V3.1. `"fp8-static"`: all tokens have one scale, and all h another, which experts in 8
        bits bring along (`input_scale` of `jaxmoe.BlockScaled`, as ModelOpt calibrates it); what is too large becomes
        the largest number; the default where all of their matrices have one. `"w8a16"`: experts in 8 bits are decoded
        to the dtype of `x`, and nothing else is rounded. `"w4a16"`: the same with experts in 4 bits, and the default
        there; with `jaxmoe.MXFP4` the first two round tokens and h too, beside experts that stay as they are, and with
        `jaxmoe.NVFP4` beside experts that are rounded, which `jaxmoe.through_e4m3` asks for (and which makes those of
        MXFP4 faster where they have many rows). `None` with wide experts: nothing has 8 bits.
        Gradients are those of the layer in the dtype of `x`, of `x` and of the experts as they were before rounding
        (decoded, where they came in 8 or 4 bits); gate and up are then computed again, unless nothing but experts was
        decoded.
        Where nothing of the experts is differentiated (they are left out of the argnums of `jax.grad`, or given through
        `jax.lax.stop_gradient`), the backward pass makes no gradients of them, which is more than a third of its work.
      accumulation: how products of 8-bit tokens (or h) and weights become sums. `"promoted"`: of each 128 columns in
        the tensor cores, and from there on in float32, with the scales of each. `"fast"`: of all columns in the tensor
        cores, whose sums keep some 13 bits behind the binary point, scaled once (what others call fast accumulation);
        with `precision="fp8-static"` and scales of output channels or whole matrices alone, since other scales change
        along the columns. Its sums are less exact on GPUs; other platforms add up in float32 either way.
      network: where the experts are spread over several hosts: which ranks are of one host, and how tokens travel
        between hosts, by XLA's collectives, around a layer that each host computes for itself. `None`: as the devices
        of the mesh say, with the choices that `jaxmoe.explain` shows; `jaxmoe.NetworkPlan(ranks_per_host=...)` states
        it, for instance inside a `shard_map` whose mesh is abstract.
      return_stats: also return `MoEStats`, summed over the ranks that share the experts (outside `shard_map`: all).
        With a balance loss besides, `jaxmoe.router_aux` has both in one sum over the mesh.

    Returns:
      `y`, of the shape and dtype of `x`, and placed as it is where JAX knows how (see `data_axes`); with `return_stats`
      the pair `(y, stats)`.

    Raises:
      ValueError: shapes, sizes or mesh axes that do not go together; symbolic sizes (`jax.export.symbolic_shape`);
        unknown activation or implementation.
      TypeError: wrong types or dtypes; gradients of experts in 8 or 4 bits.
      NotImplementedError: under `jax.vmap`, `jax.jacrev`, `jax.jacfwd`; under `jax.jvp`, but for `"reference"`; a named
        implementation that does not exist for the platform, the build or the activation.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=4, hidden=8, intermediate=16)
    >>> x, logits = jnp.ones((3, 8)), jnp.arange(12.0).reshape(3, 4)
    >>> routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2, renormalize=True))
    >>> jaxmoe.moe_layer(x, routing, experts, axis_name=None).shape
    (3, 8)
    >>> in_8_bits = jaxmoe.quantize(experts)
    >>> jaxmoe.moe_layer(x, routing.topk_ids, routing.topk_weights, in_8_bits, axis_name=None, precision="fp8").shape
    (3, 8)
    """
    arguments, routed_experts = Arguments.given(x, topk_ids, topk_weights, experts, token_valid)
    options = CallOptions(
        activation,
        axis_name,
        data_axes,
        mesh,
        implementation,
        plan,
        residuals,
        precision,
        accumulation,
        network,
        hidden_axis,
        intermediate_axis,
    )
    y, stats = run(arguments, options, return_stats, routed_experts)
    return (y, stats) if return_stats else y


def run(
    arguments: Arguments, options: CallOptions, return_stats: bool = False, routed_experts: int | None = None
) -> tuple[jax.Array, MoEStats | None]:
    """Returns the output, and statistics where they are asked for: `moe_layer` with its arguments put together."""
    arguments = as_jax(arguments)
    call = calls.check(arguments, options, routed_experts)
    calls.warn_of_repeated_work(call, options)
    if arguments.x.size == 0:
        # Nothing to mask, and XLA (jax 0.11.2) fails on an operand without elements that is used twice.
        arguments = arguments._replace(token_valid=None)
    return _compiled(call, return_stats)(arguments)


def _constant_quantized(experts: AnyExperts) -> AnyExperts:
    """Returns the experts; what is in 8 or 4 bits refuses to be differentiated with respect to."""

    def guarded(array: Any) -> Any:
        return not_differentiated(array, type(array)) if isinstance(array, QuantizedMatrix) else array

    return jax.tree.map(guarded, experts, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))


@functools.lru_cache(maxsize=1024)
def _compiled(call: Call, return_stats: bool) -> Callable[[Arguments], tuple[jax.Array, MoEStats | None]]:
    """One function per kind of call, so that calling it again outside of any `jit` finds it compiled."""
    layer = functools.partial(_on_rank if call.placement.mesh is None else _on_mesh, call, return_stats)

    def guarded(arguments: Arguments) -> tuple[jax.Array, MoEStats | None]:
        arguments = jax.tree.map(not_mapped, arguments)
        return layer(arguments._replace(experts=_constant_quantized(arguments.experts)))

    if IMPLEMENTATIONS[call.implementation].by_autodiff:
        return jitted(guarded)
    # The backward pass starts from the arguments themselves. What is made of them inside, such as the part of the
    # experts that a rank of `shard_map` sees, would be new arrays for JAX, and a scan over layers would keep a copy of
    # all experts for its backward pass. No kernel runs twice: nobody asks for what it would compute again.
    kept = (*CHECKPOINT_NAMES, ARRIVED_NAME) if call.residuals == "save" else (ARRIVED_NAME,)
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return jitted(jax.checkpoint(guarded, policy=policy, prevent_cse=False))


def _on_mesh(call: Call, return_stats: bool, arguments: Arguments) -> tuple[jax.Array, MoEStats | None]:
    """The layer for all tokens, outside of any `shard_map`."""
    placement, tokens = call.placement, call.token_split.spec
    experts = call.expert_split.specs(arguments.experts, placement.group.axis_names)
    specs = Arguments(tokens, tokens, tokens, experts, tokens)
    sharded = jax.shard_map(
        functools.partial(_on_rank, call, return_stats),
        mesh=placement.mesh if isinstance(placement.mesh, Mesh) else None,
        in_specs=(specs,),
        out_specs=(tokens, PartitionSpec()),
        axis_names=set(placement.manual_axes),
    )
    y, stats = sharded(array_layout.reshard_explicit(arguments, specs, placement.mesh))
    return array_layout.like(y, arguments.x, placement.mesh, placement.result), stats


def _on_rank(call: Call, return_stats: bool, arguments: Arguments) -> tuple[jax.Array, MoEStats | None]:
    """The layer for the tokens of one rank, whose experts are `arguments.experts`."""
    batch, num_experts, top_k = arguments.x.shape[:-1], call.shape.num_experts, call.shape.top_k
    x = arguments.x.reshape(-1, call.shape.hidden)
    ids = int32_ids(arguments.topk_ids.reshape(-1, top_k))
    weights = arguments.topk_weights.reshape(-1, top_k)
    valid = None if arguments.token_valid is None else arguments.token_valid.reshape(-1)

    stats = None
    if return_stats:
        axes = call.placement.stats_axes if call.placement.mesh is None else call.token_split.entered_axes
        stats = load_stats(ids, num_experts, token_valid=valid, axis_name=axes or None)

    used = (ids >= 0) & (ids < num_experts)
    if valid is not None:
        used &= valid[:, None]
        x = jnp.where(valid[:, None], x, 0)
    ids = jnp.where(used, ids, -1)
    weights = jnp.where(used, weights, 0)

    if x.size == 0:  # XLA:GPU (jax 0.11) crashes while it compiles gradients of products without rows
        y = jnp.zeros_like(x)
    else:
        x, ids, weights = call.token_split.part((x, ids, weights), (0, -1, 0))
        experts = call.expert_split.gather(arguments.experts, x, rounds=call.precision is None)
        if call.precision is not None:
            experts = split(experts)  # what is rounded is a copy in any case
        inputs = Inputs(x, ids, weights, experts)
        on_ranks = IMPLEMENTATIONS[call.implementation].run
        y = on_ranks(call, inputs) if call.levels is None else across_hosts.run(call, inputs, on_ranks)
        y = call.token_split.whole(call.expert_split.add_up(y))
    return y.reshape(*batch, call.shape.hidden), stats
