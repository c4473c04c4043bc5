"""The weights of all experts of a layer as one pytree, in the layouts that JAX models train in."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from jaxmoe.block_scaled import BLOCK_KINDS, BlockKind, BlockScaled
from jaxmoe.formats import bits
from jaxmoe.four_bit import NVFP4, FourBit
from jaxmoe.pytrees import pytree
from jaxmoe.quantized_matrix import QuantizedMatrix


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
    def common_kinds(self) -> tuple[BlockKind, ...]:
        """What may share a scale in all matrices, which are `BlockScaled`; none where they differ."""
        matrices: list[Any] = [self.w_gate, self.w_down, *([] if self.w_up is None else [self.w_up])]
        return tuple(kind for kind in BLOCK_KINDS if all(kind in matrix.kinds for matrix in matrices))

    def __repr__(self) -> str:
        arrays = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        present = {name: array for name, array in arrays.items() if array is not None}
        leaves = jax.tree.leaves(list(present.values()))
        if not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
            return f"Experts({', '.join(f'{name}={array!r}' for name, array in arrays.items())})"
        size = sum(leaf.size * bits(leaf.dtype) // 8 for leaf in leaves)
        return f"Experts({', '.join(f'{name}={_format_of(array)}' for name, array in present.items())}; {size} bytes)"

    def astype(self, dtype: DTypeLike) -> "Experts":
        """Returns the experts with every array cast to `dtype`.

        Raises:
          TypeError: a matrix is quantised: its values mean nothing without their scales.
        """
        for field in dataclasses.fields(self):
            if isinstance(matrix := getattr(self, field.name), QuantizedMatrix):
                raise TypeError(
                    f"Experts.astype: {field.name} is {type(matrix).__name__}. Pass jaxmoe.dequantize(experts, dtype) "
                    "for wide matrices."
                )
        return jax.tree.map(lambda array: array.astype(dtype), self)

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
        """
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


def _format_of(array: Any) -> str:
    """Returns the format and sizes of an array, in the order of its elements."""
    if isinstance(array, QuantizedMatrix):
        kind = f"{type(array).__name__} " if isinstance(array, FourBit) else ""
        of_matrix = f" and {_format_of(array.global_scales)}" if isinstance(array, NVFP4) else ""
        return f"{kind}{_format_of(array.values)} with scales {_format_of(array.scales)}{of_matrix}"
    return f"{array.dtype}{list(array.shape)}"


def takes_experts(dtype: Any, token_dtype: Any) -> bool:
    """Whether `moe_layer` takes experts of a dtype beside tokens of another.

    >>> takes_experts(jnp.float32, jnp.bfloat16), takes_experts(jnp.bfloat16, jnp.float32)
    (True, False)
    """
    narrow_tokens = jnp.dtype(token_dtype).itemsize == 2
    return jnp.dtype(dtype) == jnp.dtype(token_dtype) or (narrow_tokens and jnp.dtype(dtype) == jnp.float32)


def check(experts: Any, *, hidden: int, dtype: Any, hidden_ranks: int = 1) -> Experts:
    """Raises a `TypeError` or `ValueError` that names the array, what it is and what it must be.

    Args:
      experts: what the user passed.
      hidden: width of the tokens.
      hidden_ranks: ranks over which the experts are split along it, where they are shards.
      dtype: of the tokens; every array of the experts must have it, or be float32 where it has 16 bits.
    """
    if not isinstance(experts, Experts):
        raise TypeError(
            f"moe_layer: experts is a {type(experts).__name__}; pass jaxmoe.Experts(w_gate, w_up, w_down, ...)."
        )
    arrays = {field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}
    for name in ("w_gate", "w_down"):
        if arrays[name] is None:
            raise TypeError(f"moe_layer: experts.{name} is None; only w_up and the biases may be None.")
    for name, array in arrays.items():
        if hasattr(array, "qvalue") and hasattr(array, "scale"):
            raise TypeError(_values_and_scales_of_another_library(name, array))
        for leaf in _leaves(array):
            if leaf is not None and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise TypeError(f"moe_layer: experts.{name} is a {type(leaf).__name__}; it must be an array.")
    said, hidden = f"x has hidden={hidden}", hidden // hidden_ranks
    if hidden_ranks > 1:
        said += f", so a shard over the {hidden_ranks} ranks of hidden_axis must have {hidden}"
    if any(isinstance(array, QuantizedMatrix) for array in arrays.values()):
        _check_quantized(experts, arrays, hidden, said)
    if len(experts.w_gate.shape) != 3:
        raise ValueError(
            f"moe_layer: experts.w_gate has shape {experts.w_gate.shape}; it must be [experts, hidden, intermediate]."
        )
    num_experts, width, intermediate = experts.w_gate.shape
    if width != hidden:
        raise ValueError(
            f"moe_layer: experts.w_gate has shape {experts.w_gate.shape}, so hidden={width}; {said}. "
            "w_gate and w_up are [experts, hidden, intermediate] and w_down is [experts, intermediate, hidden]: "
            "weights stored as torch does, [experts, out, in], have to be transposed."
        )
    if 0 in experts.w_gate.shape:
        raise ValueError(f"moe_layer: experts.w_gate has shape {experts.w_gate.shape}; no dimension may be zero.")
    needed = {
        "w_gate": (num_experts, hidden, intermediate),
        "w_up": (num_experts, hidden, intermediate),
        "w_down": (num_experts, intermediate, hidden),
        "b_gate": (num_experts, intermediate),
        "b_up": (num_experts, intermediate),
        "b_down": (num_experts, hidden),
    }
    quantized = [name for name, array in arrays.items() if isinstance(array, QuantizedMatrix)]
    wide = {name: array for name, array in arrays.items() if array is not None and name not in quantized}
    for name, array in arrays.items():
        if array is None:
            continue
        if tuple(array.shape) != needed[name]:
            raise ValueError(
                f"moe_layer: experts.{name} has shape {tuple(array.shape)}; it must be {needed[name]} to go with "
                f"w_gate of shape {tuple(experts.w_gate.shape)}."
            )
        if name in quantized:
            continue
        if jnp.dtype(array.dtype).itemsize == 1:
            four_bit = array.dtype in (jnp.float4_e2m1fn, jnp.uint8)
            types = "MXFP4(values, scales) or jaxmoe.NVFP4(values, scales, global_scales)"
            raise TypeError(
                f"moe_layer: experts.{name} is {array.dtype}, which needs scales. Pass jaxmoe."
                f"{types if four_bit else 'BlockScaled(values, scales)'}, values as [experts, out, in]."
            )
        if not takes_experts(array.dtype, dtype):
            raise TypeError(
                f"moe_layer: experts.{name} is {array.dtype}, x is {dtype}; they must be equal, or the experts float32 "
                "and x bfloat16 or float16. Cast one of them, e.g. experts.astype(x.dtype)."
            )
        first = next(iter(wide))
        if array.dtype != wide[first].dtype:
            raise TypeError(
                f"moe_layer: experts.{name} is {array.dtype}, experts.{first} is {wide[first].dtype}; they must be "
                "equal."
            )
    if experts.b_up is not None and experts.w_up is None:
        raise ValueError("moe_layer: experts.b_up is given but experts.w_up is None; a plain FFN has no up projection.")
    return experts


def _values_and_scales_of_another_library(name: str, array: Any) -> str:
    """Returns the error of an array such as qwix' `QArray`: integers or 8-bit floats as `qvalue`, and their `scale`."""
    values, scales = (f"{each.dtype}{list(each.shape)}" for each in (array.qvalue, array.scale))
    if name.startswith("b_"):
        todo = "Biases are wide: pass qvalue * scale as one array."
    elif array.qvalue.dtype == jnp.float8_e4m3fn:
        todo = (
            "Pass jaxmoe.BlockScaled(values, scales), values as [experts, out, in]: where qvalue lies as "
            f"[experts, in, out], experts.{name} = jaxmoe.BlockScaled(q.qvalue.swapaxes(1, 2), q.scale.swapaxes(1, 2))."
        )
    else:
        todo = (
            "jaxmoe.BlockScaled(values, scales), values as [experts, out, in], has float8_e4m3fn alone: decode this "
            "one to a wide array, and pass jaxmoe.quantize(experts) for 8 bits."
        )
    return f"moe_layer: experts.{name} is a {type(array).__name__} with qvalue {values} and scale {scales}. {todo}"


def _leaves(array: Any) -> list[Any]:
    """Returns the arrays of a field of experts."""
    if not isinstance(array, QuantizedMatrix):
        return [array]
    return [getattr(array, field.name) for field in dataclasses.fields(array)]  # pyright: ignore[reportArgumentType]


def _check_quantized(experts: Experts, arrays: dict[str, Any], hidden: int, said: str) -> None:
    """Raises where some matrices are quantised and do not go together."""
    matrices = {name: array for name, array in arrays.items() if name.startswith("w_") and array is not None}
    kind = next(type(array) for array in arrays.values() if isinstance(array, QuantizedMatrix))
    for name, array in arrays.items():
        if isinstance(array, kind) != (name in matrices) and array is not None:
            other = type(array).__name__ if isinstance(array, QuantizedMatrix) else f"{array.dtype}"
            needed = f"all matrices of experts must be {kind.__name__}, or none, and biases wide"
            raise TypeError(
                f"moe_layer: experts.{name} is {other}; {needed}. Pass jaxmoe.quantize(experts), or "
                "jaxmoe.dequantize(experts, x.dtype)."
            )
    for name, matrix in matrices.items():
        try:
            matrix.check()
        except (TypeError, ValueError) as error:
            raise type(error)(f"moe_layer: experts.{name}: {error}") from error
        _, inner, out = matrix.shape
        into, back = ("intermediate", "hidden") if name != "w_down" else ("hidden", "intermediate")
        lies = out if name == "w_down" else inner
        if lies != hidden:
            halved = " / 2" if matrix.values.dtype == jnp.uint8 else ""
            raise ValueError(
                f"moe_layer: experts.{name} has values of shape {tuple(matrix.values.shape)}, {matrix.values.dtype}, "
                f"which must be [experts, {into}, {back}{halved}]; {said}. {matrix.transposition}"
            )
    if kind is BlockScaled:
        _check_blocks(experts, matrices)


def _check_blocks(experts: Experts, matrices: dict[str, Any]) -> None:
    """Raises where the scales of `BlockScaled` matrices are not of one kind."""
    formats = {name: f"{' or '.join(matrix.kinds)} of {matrix.scales.dtype}" for name, matrix in matrices.items()}
    if not experts.common_kinds or len({matrix.scales.dtype for matrix in matrices.values()}) > 1:
        listed = ", ".join(f"{name} {format_}" for name, format_ in formats.items())
        raise ValueError(
            f"moe_layer: the matrices of experts have scales of different kinds: {listed}. They must have the same: "
            "jaxmoe.quantize(jaxmoe.dequantize(experts, jnp.float32), block)."
        )
