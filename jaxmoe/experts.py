"""The weights of all experts of a layer as one pytree, in the layouts that JAX models train in.

What must hold of them in a call is in `expert_checks.py`.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, Shaped, UInt32

from jaxmoe.arrays import is_array
from jaxmoe.block_scaled import BLOCK_KINDS, BlockKind
from jaxmoe.formats import bits, check_wide_dtype
from jaxmoe.four_bit import NVFP4, FourBit
from jaxmoe.pytrees import pytree
from jaxmoe.quantized_matrix import QuantizedMatrix, leaves_of

Layout = Literal["halves", "interleaved"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@pytree
class Experts:
    """Stacked weights of the experts: `y = activation(x @ w_gate, x @ w_up) @ w_down`.

    The arrays are read as they are: no implementation keeps a transposed or interleaved copy. Inside `shard_map` the
    leading dimension holds this rank's experts; outside it holds all of them.

    Args:
      w_gate: `[experts, hidden, intermediate]`, the projection that the activation is applied to.
      w_up: `[experts, hidden, intermediate]`, the projection it is multiplied with; `None` for a plain two-matrix FFN.
      w_down: `[experts, intermediate, hidden]`.
      b_gate: `[experts, intermediate]` or `None`.
      b_up: `[experts, intermediate]` or `None`.
      b_down: `[experts, hidden]` or `None`; it is part of the expert, so the routing weight multiplies it too.

    Gate and up that are one array stay so: `Experts.from_fused`.

    All matrices may also be `jaxmoe.BlockScaled`, in 8 bits, or `jaxmoe.MXFP4` or `jaxmoe.NVFP4`, in 4 bits
    (`jaxmoe.quantize`), with biases that stay wide.

    >>> import jax
    >>> experts = Experts.init(jax.random.key(0), num_experts=4, hidden=16, intermediate=32)
    >>> experts.w_down.shape, experts.num_experts
    ((4, 32, 16), 4)
    """

    # Any for the narrow types: code that works with wide matrices alone would have to rule them out at every use.
    w_gate: Float[Array, "experts hidden intermediate"] | Any
    w_up: Float[Array, "experts hidden intermediate"] | Any | None
    w_down: Float[Array, "experts intermediate hidden"] | Any
    b_gate: Float[Array, "experts intermediate"] | None = None
    b_up: Float[Array, "experts intermediate"] | None = None
    b_down: Float[Array, "experts hidden"] | None = None

    @property
    def num_experts(self) -> int:
        """Length of the leading dimension: all experts outside `shard_map`, this rank's inside."""
        return self.w_gate.shape[0]

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return self.w_gate.shape[1]

    @property
    def intermediate(self) -> int:
        """Width between the two GEMMs."""
        return self.w_gate.shape[2]

    @property
    def gated(self) -> bool:
        """Whether there is an up projection."""
        return self.w_up is not None

    @property
    def matrix(self) -> Any:
        """One of the matrices, which are all of one type."""
        return self.w_gate

    @property
    def common_kinds(self) -> tuple[BlockKind, ...]:
        """What may share a scale in all matrices, which are `BlockScaled`; none where they differ."""
        matrices: list[Any] = [self.w_gate, self.w_down, *([] if self.w_up is None else [self.w_up])]
        return tuple(kind for kind in BLOCK_KINDS if all(kind in matrix.kinds for matrix in matrices))

    def __repr__(self) -> str:
        return _repr(self)

    def astype(self, dtype: DTypeLike) -> "Experts":
        """Returns the experts with every array cast to `dtype`.

        Raises:
          TypeError: `dtype` is none of bfloat16, float16, float32 and float64; a matrix is quantised: its values mean
            nothing without their scales.
        """
        return _cast(self, dtype)

    def fuse(self, layout: Layout) -> "FusedExperts":
        """Returns the same experts with gate and up in one array, which is a copy: see `from_fused`.

        A bias that only one of them has becomes one of both, with zeros.

        Raises:
          ValueError: another layout; experts without an up projection.
          TypeError: a matrix is quantised: those are read apart.

        >>> import jax
        >>> experts = Experts.init(jax.random.key(0), num_experts=4, hidden=16, intermediate=32)
        >>> experts.fuse("halves").w_gate_up.shape
        (4, 16, 64)
        """
        if self.w_up is None:
            raise ValueError("Experts.fuse: w_up is None: a plain FFN has no up projection to fuse.")
        if isinstance(self.w_gate, QuantizedMatrix):
            raise TypeError(f"Experts.fuse: w_gate is {type(self.w_gate).__name__}, and only wide matrices are fused.")
        # Of which only the layout is used.
        empty = Experts.from_fused(self.w_gate, self.w_down, layout=layout)
        given, b_gate_up = [bias for bias in (self.b_gate, self.b_up) if bias is not None], None
        if given:
            zeros = jnp.zeros_like(given[0])
            b_gate_up = empty.join(*(zeros if bias is None else bias for bias in (self.b_gate, self.b_up)))
        return FusedExperts(empty.join(self.w_gate, self.w_up), self.w_down, b_gate_up, self.b_down, layout)

    @classmethod
    def from_fused(
        cls,
        w_gate_up: Float[Array, "experts hidden both"],
        w_down: Float[Array, "experts intermediate hidden"],
        *,
        layout: Layout,
        b_gate_up: Float[Array, "experts both"] | None = None,
        b_down: Float[Array, "experts hidden"] | None = None,
    ) -> "FusedExperts":
        """Returns experts whose gate and up projections stay the one array that they are.

        Args:
          w_gate_up: `[experts, hidden, 2 * intermediate]`, gate and up.
          w_down: `[experts, intermediate, hidden]`.
          layout: `"halves"`: all columns of gate, then those of up, as MaxText and Levanter fuse them;
            `"interleaved"`: column 2 j is column j of gate and 2 j + 1 that of up, as gpt-oss has them.
          b_gate_up: `[experts, 2 * intermediate]` in the same order, or `None`.
          b_down: `[experts, hidden]` or `None`.

        Raises:
          ValueError: another layout.

        >>> import jax.numpy as jnp
        >>> w_gate_up, w_down = jnp.ones((4, 16, 64)), jnp.ones((4, 32, 16))
        >>> Experts.from_fused(w_gate_up, w_down, layout="halves").intermediate
        32
        """
        if layout not in LAYOUTS:
            raise ValueError(
                f"Experts.from_fused: layout={layout!r} is not known. It must be 'halves', columns of gate and then "
                "those of up, or 'interleaved', a column of gate and one of up in turn."
            )
        return FusedExperts(w_gate_up, w_down, b_gate_up, b_down, layout)

    @classmethod
    def init(
        cls,
        key: PRNGKeyArray | UInt32[Array, "2"],
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        dtype: DTypeLike = jnp.float32,
        gated: bool = True,
        biases: bool = False,
    ) -> "Experts":
        """Returns normally distributed weights of variance 1 / fan-in (LeCun) and zero biases.

        Args:
          key: a `jax.random` key.
          num_experts: number of experts.
          hidden: width of a token.
          intermediate: width between the two GEMMs.
          dtype: of every array.
          gated: with an up projection; `False` gives `w_up=None`.
          biases: with biases on all projections.

        Raises:
          TypeError: `dtype` is none of bfloat16, float16, float32 and float64.
        """
        check_wide_dtype("Experts.init", "dtype is", dtype)
        keys = jax.random.split(key, 3)
        into = (num_experts, hidden, intermediate)
        back = (num_experts, intermediate, hidden)

        def normal(key: Any, shape: tuple[int, int, int]) -> jax.Array:
            return (jax.random.normal(key, shape, jnp.float32) * shape[1] ** -0.5).astype(dtype)

        def zeros(width: int) -> jax.Array | None:
            return jnp.zeros((num_experts, width), dtype) if biases else None

        return cls(
            w_gate=normal(keys[0], into),
            w_up=normal(keys[1], into) if gated else None,
            w_down=normal(keys[2], back),
            b_gate=zeros(intermediate),
            b_up=zeros(intermediate) if gated else None,
            b_down=zeros(hidden),
        )


@pytree
class FusedExperts:
    """`Experts` whose gate and up projections are one array, made by `Experts.from_fused`.

    `moe_layer` takes them in the place of `Experts`, and their gradients lie as they do. The megakernel reads and
    differentiates the array where it lies, and `"xla"` multiplies with all of it at once; nothing slices it. What is
    made of such weights in fewer bits, by a `precision` or by `jaxmoe.quantize`, has gate and up apart.

    Args:
      w_gate_up: `[experts, hidden, 2 * intermediate]`.
      w_down: `[experts, intermediate, hidden]`.
      b_gate_up: `[experts, 2 * intermediate]` or `None`.
      b_down: `[experts, hidden]` or `None`.
      layout: of gate and up in both: `"halves"` or `"interleaved"`, see `Experts.from_fused`.

    >>> import jax.numpy as jnp
    >>> experts = Experts.from_fused(jnp.ones((4, 16, 64)), jnp.ones((4, 32, 16)), layout="interleaved")
    >>> experts.split().w_up.shape
    (4, 16, 32)
    """

    w_gate_up: Float[Array, "experts hidden both"] | Any
    w_down: Float[Array, "experts intermediate hidden"] | Any
    b_gate_up: Float[Array, "experts both"] | None = None
    b_down: Float[Array, "experts hidden"] | None = None
    layout: Layout = dataclasses.field(default="halves", metadata={"static": True})

    @property
    def num_experts(self) -> int:
        """Length of the leading dimension: all experts outside `shard_map`, this rank's inside."""
        return self.w_gate_up.shape[0]

    @property
    def hidden(self) -> int:
        """Width of a token."""
        return self.w_gate_up.shape[1]

    @property
    def intermediate(self) -> int:
        """Width between the two GEMMs."""
        return self.w_gate_up.shape[2] // 2

    @property
    def gated(self) -> bool:
        """Whether there is an up projection: always."""
        return True

    @property
    def matrix(self) -> Any:
        """One of the matrices, which are all of one type."""
        return self.w_gate_up

    def __repr__(self) -> str:
        return _repr(self)

    def astype(self, dtype: DTypeLike) -> "FusedExperts":
        """Returns the experts with every array cast to `dtype`.

        Raises:
          TypeError: `dtype` is none of bfloat16, float16, float32 and float64; a matrix is quantised.
        """
        return _cast(self, dtype)

    def split(self) -> Experts:
        """Returns the same experts with gate and up in arrays of their own, which are copies.

        Raises:
          TypeError: gate and up are quantised.
        """
        if isinstance(self.w_gate_up, QuantizedMatrix):
            raise TypeError(
                f"FusedExperts: w_gate_up is {type(self.w_gate_up).__name__}, and gate and up in one array must be "
                "wide. Pass jaxmoe.Experts(w_gate, w_up, w_down, ...), or jaxmoe.dequantize(experts, dtype) of these."
            )
        w_gate, w_up = self.columns_of(self.w_gate_up)
        b_gate, b_up = (None, None) if self.b_gate_up is None else self.columns_of(self.b_gate_up)
        return Experts(w_gate, w_up, self.w_down, b_gate, b_up, self.b_down)

    def columns_of(self, both: Shaped[Array, "*batch both"]) -> tuple[jax.Array, jax.Array]:
        """Returns columns of gate and of up, of an array whose last dimension lies as that of the weights."""
        if self.layout == "halves":
            gate, up = jnp.split(both, 2, axis=-1)
        else:
            # Not every second column, which an axis of a mesh may split (Explicit axes).
            pairs = both.reshape(*both.shape[:-1], both.shape[-1] // 2, 2)
            gate, up = pairs[..., 0], pairs[..., 1]
        return gate, up

    def join(self, gate: Shaped[Array, "*batch each"], up: Shaped[Array, "*batch each"]) -> jax.Array:
        """Returns the way back of `columns_of`."""
        if self.layout == "halves":
            return jnp.concatenate([gate, up], axis=-1)
        return jnp.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)


AnyExperts = Experts | FusedExperts


def split(experts: AnyExperts) -> Experts:
    """Returns experts with gate and up in arrays of their own: those that have them as they are."""
    return experts.split() if isinstance(experts, FusedExperts) else experts


def arrays_of(experts: AnyExperts) -> dict[str, Any]:
    """Returns the arrays by name, matrices in few bits as they are, `None` where experts have none of that name."""
    fields = (field for field in dataclasses.fields(experts) if not field.metadata.get("static"))
    return {field.name: getattr(experts, field.name) for field in fields}


def present(experts: AnyExperts) -> dict[str, Any]:
    """Returns the arrays that experts have, by name."""
    return {name: array for name, array in arrays_of(experts).items() if array is not None}


def _cast(experts: Any, dtype: DTypeLike) -> Any:
    """Returns experts with every array cast to `dtype`, as `astype` of both classes."""
    caller = f"{type(experts).__name__}.astype"
    check_wide_dtype(caller, "dtype is", dtype)
    for name, matrix in present(experts).items():
        if isinstance(matrix, QuantizedMatrix):
            raise TypeError(
                f"{caller}: {name} is {type(matrix).__name__}. Pass jaxmoe.dequantize(experts, dtype) for wide "
                "matrices."
            )
    return jax.tree.map(lambda array: array.astype(dtype), experts)


def _repr(experts: AnyExperts) -> str:
    kind, arrays = type(experts).__name__, present(experts)
    layout = f", layout={experts.layout!r}" if isinstance(experts, FusedExperts) else ""
    leaves = [leaf for array in arrays.values() for leaf in leaves_of(array)]
    if not all(map(is_array, leaves)):
        return f"{kind}({', '.join(f'{name}={array!r}' for name, array in arrays_of(experts).items())}{layout})"
    size = sum(leaf.size * bits(leaf.dtype) // 8 for leaf in leaves)
    return f"{kind}({', '.join(f'{name}={_format_of(array)}' for name, array in arrays.items())}{layout}; {size} bytes)"


def _format_of(array: Any) -> str:
    """Returns the format and sizes of an array, in the order of its elements."""
    if isinstance(array, QuantizedMatrix):
        kind = f"{type(array).__name__} " if isinstance(array, FourBit) else ""
        of_matrix = f" and {_format_of(array.global_scales)}" if isinstance(array, NVFP4) else ""
        of_input = getattr(array, "input_scale", None)
        given = "" if of_input is None else f" and input_scale {_format_of(of_input)}"
        return f"{kind}{_format_of(array.values)} with scales {_format_of(array.scales)}{of_matrix}{given}"
    return f"{array.dtype}{list(array.shape)}"
