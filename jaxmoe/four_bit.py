"""Matrices in 4 bits, E2M1 with a scale for each few of them along the inputs, in the fields of `Experts`.

`four_bit_quantization.py` makes them of wide ones; `precision.py` says what `moe_layer` does with them. They stay
packed wherever they lie: 4.25 bits a weight as MXFP4, 4.5 as NVFP4.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from jaxmoe import e2m1, e4m3_blocks, e8m0
from jaxmoe.formats import Format
from jaxmoe.matrix_split import MatrixSplit
from jaxmoe.pytrees import pytree
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.wording import a_type

Tree = TypeVar("Tree")


class FourBit(QuantizedMatrix):
    """What `MXFP4` and `NVFP4` share: E2M1 values, and a scale for each group of them."""

    bits = 4
    # Inputs that share a scale, and what a scale is.
    group: ClassVar[int]
    scale_dtype: ClassVar[Any]
    # What to write where the scales are something else.
    scale_advice: ClassVar[str]
    through_e4m3: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """`[experts, in, out]`, as `Experts` has it."""
        *experts, out, inner = self.values.shape
        return *experts, self._together * inner, out

    @property
    def dtype(self) -> Any:
        """Of a weight, whether or not two of them are given as a byte."""
        return jnp.dtype(e2m1.ELEMENT)

    @property
    def repacked(self) -> bool:
        """Whether values are those of `jaxmoe.repacked`."""
        return self.values.dtype == jnp.uint32

    @property
    def _together(self) -> int:
        """Weights in an item of `values`."""
        return {"uint8": 2, "uint32": 8}.get(jnp.dtype(self.values.dtype).name, 1)

    @property
    def divisor(self) -> str:
        """What the inputs are divided by in the shape of `values`, in words."""
        return "" if self._together == 1 else f" / {self._together}"

    def check(self) -> None:
        """Raises where the arrays are not what the class says.

        Raises:
          TypeError: values or scales of other dtypes.
          ValueError: shapes that do not go together.
        """
        name, values, scales = type(self).__name__, self.values, self.scales
        if values.dtype not in (jnp.uint8, jnp.uint32, e2m1.ELEMENT):
            raise TypeError(
                f"{name}: values are {values.dtype}; they must be float4_e2m1fn [experts, out, in], or uint8 "
                "[experts, out, in / 2] with the even index in the lower 4 bits. Bytes of another type are read as "
                "such by values.view(jnp.uint8)."
            )
        if scales.dtype != self.scale_dtype:
            raise TypeError(
                f"{name}: scales are {scales.dtype}; they must be {jnp.dtype(self.scale_dtype).name}. "
                f"{self.scale_advice}"
            )
        if len(values.shape) == 3:
            experts, inner, out = self.shape
            if inner and inner % self.group == 0 and tuple(scales.shape) == (experts, out, inner // self.group):
                return
        wanted = f"[experts, out, in{self.divisor}]"
        raise ValueError(
            f"{name}: {values.dtype} values {tuple(values.shape)} and scales {tuple(scales.shape)} do not go together. "
            f"Values are {wanted} and scales [experts, out, in / {self.group}], where in is a multiple of "
            f"{self.group}. {self.transposition}"
        )

    @property
    def transposition(self) -> str:
        """What to do where the arrays lie as [experts, in, out], in words."""
        if self._together == 1:
            return super().transposition
        return (
            "Bytes of two weights that lie as [experts, in, out / 2] have to be made anew: jaxmoe.quantize of the wide "
            "matrices."
        )

    @property
    def packed(self) -> UInt8[Array, "experts out half_in"]:
        """The values as `uint8 [experts, out, in / 2]`, even indices in the lower 4 bits, also of repacked ones."""
        self.check()
        values = jnp.asarray(self.values)
        if values.dtype == jnp.uint8:
            return values
        return e2m1.unrepack(values) if self.repacked else e2m1.pack(values)

    @property
    def elements(self) -> Float[Array, "experts out in"]:
        """The values as `float4_e2m1fn [experts, out, in]`."""
        self.check()
        values = jnp.asarray(self.values)
        return values if values.dtype == e2m1.ELEMENT else e2m1.unpack(self.packed)

    @property
    def factors(self) -> Float[Array, "experts"] | None:
        """What each matrix is multiplied with besides the scales of its groups; `None` for nothing."""
        return None

    def without_factors(self, dtype: DTypeLike) -> Float[Array, "experts in out"]:
        """Returns values times the scales of their groups as `Experts` has matrices, rounded once to `dtype`.

        Products in float32, which are exact: those of MXFP4 have 2 significant bits, those of NVFP4 6. What is below
        2^-126 becomes zero where the backend flushes such numbers, as a CPU does.
        """
        groups = e2m1.decode(self.packed)
        groups = groups.reshape(*groups.shape[:-1], groups.shape[-1] // self.group, self.group)
        for part in self._scale_parts():
            groups = groups * part[..., None]
        return groups.reshape(*groups.shape[:-2], -1).astype(dtype).swapaxes(1, 2)

    def multiplied(self, dtype: DTypeLike) -> Float[Array, "experts in out"]:
        """Returns the same with the numbers that meet rows in 8 bits: those of `without_factors`, if not rounded."""
        return self.without_factors(dtype)

    def _scale_parts(self) -> tuple[jax.Array, ...]:
        """Float32 factors whose product is the scale, each of them a normal number."""
        raise NotImplementedError

    def wide(self, dtype: DTypeLike) -> Float[Array, "experts in out"]:
        """Returns the matrices as `Experts` has them: products in float32, rounded once to `dtype`."""
        return self._with_factors(self.without_factors, dtype)

    def wide_multiplied(self, dtype: DTypeLike) -> Float[Array, "experts in out"]:
        """Returns the same with the numbers of `multiplied`."""
        return self._with_factors(self.multiplied, dtype)

    def _with_factors(self, make: Callable[[DTypeLike], jax.Array], dtype: DTypeLike) -> jax.Array:
        if self.factors is None:
            return make(dtype)
        return (make(jnp.float32) * self.factors[:, None, None]).astype(dtype)


def map_four_bit(function: Callable[[Any], Any], experts: Tree) -> Tree:
    """Returns experts with what a function makes of each matrix in 4 bits; everything else stays."""
    is_matrix = lambda leaf: isinstance(leaf, FourBit)  # noqa: E731
    return jax.tree.map(lambda leaf: function(leaf) if is_matrix(leaf) else leaf, experts, is_leaf=is_matrix)


def marked(experts: Tree, through_e4m3: bool) -> Tree:
    """Returns experts whose matrices in 4 bits say so. Looks at no number: `jaxmoe.through_e4m3` does."""
    return map_four_bit(lambda matrix: dataclasses.replace(matrix, through_e4m3=through_e4m3), experts)


def repacked(experts: Tree) -> Tree:
    """Returns experts in 4 bits whose bits lie as the GPU kernel takes them, which makes decode batches faster.

    The same numbers in as many bytes: of each eight weights of an output the bits are in another order, in which fewer
    instructions make BF16 of them (`values` become `uint32 [experts, out, in / 8]`). For serving with tokens in 16 bits
    (`precision="w4a16"`, the default): GPUs with x in bfloat16 and few rows to an expert are faster, and with many rows
    as fast as before. Call it once, where weights are loaded; under `jax.jit` too. Experts that are split stay so,
    where their words divide. All implementations take them, forward and backward, and `jaxmoe.convert.to_hf` writes
    what they were. `precision="fp8"` refuses them.

    Args:
      experts: whose matrices are `jaxmoe.MXFP4` or `jaxmoe.NVFP4`, or anything that has such.

    Raises:
      TypeError: there is no matrix in 4 bits, or values or scales of other dtypes.
      ValueError: shapes that do not go together.

    >>> import jax, jaxmoe
    >>> experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384)
    >>> packed = jaxmoe.quantize(experts, "mxfp4")
    >>> served = jaxmoe.repacked(packed)
    >>> served.w_gate.values.dtype.name, served.w_gate.values.shape, served.w_gate.nbytes == packed.w_gate.nbytes
    ('uint32', (4, 384, 32), True)
    >>> bool((served.w_gate.wide("float32") == packed.w_gate.wide("float32")).all())
    True
    """
    found = []

    def repack(matrix: Any) -> Any:
        matrix.check()
        found.append(matrix)
        if matrix.repacked:
            return matrix
        lies = MatrixSplit.of(matrix.values).transposed
        whole = lies.without_cuts(matrix.shape, (e2m1.NUMBERS_OF_WORD, 1))
        apart = dataclasses.replace(matrix, values=whole.transposed.place(matrix.values))
        return dataclasses.replace(matrix, values=lies.transposed.place(e2m1.repack(apart.packed)))

    made = map_four_bit(repack, experts)
    if not found:
        raise TypeError(
            f"repacked: experts is {a_type(experts)} without a matrix in 4 bits; they must be jaxmoe.MXFP4 or "
            "jaxmoe.NVFP4. Pass jaxmoe.quantize(experts, 'mxfp4') of wide ones."
        )
    return made


@pytree
class MXFP4(FourBit):
    """A matrix for each expert in E2M1 with a power of two for each 32 weights of an output, as gpt-oss has them.

    A weight is its value times the scale of its group of 32 inputs (the OCP Microscaling formats, version 1.0).

    Args:
      values: `float4_e2m1fn [experts, out, in]`, or two in a byte: `uint8 [experts, out, in / 2]` with the even index
        in the lower 4 bits. That is how checkpoints lie, and the transpose of the matrices that `Experts` has in wide
        types. Or `uint32 [experts, out, in / 8]`, which `jaxmoe.repacked` makes.
      scales: `float8_e8m0fnu [experts, out, in / 32]`, powers of two whose byte is the exponent + 127; byte 255 is NaN.
        The bytes of a checkpoint are read as such by `scales.view(jnp.float8_e8m0fnu)`.
      through_e4m3: whether the weights are known to be exact in E4M3, as `jaxmoe.through_e4m3` finds out.

    `shape` is that of the wide matrices, so that `Experts` with these arrays has the same sizes.

    >>> import jax.numpy as jnp
    >>> scales = jnp.full((4, 256, 3), 127, jnp.uint8).view(jnp.float8_e8m0fnu)
    >>> w = MXFP4(jnp.full((4, 256, 48), 0x21, jnp.uint8), scales)
    >>> w.shape, w.wide(jnp.bfloat16)[0, :4, 0].tolist(), 8 * w.nbytes / (4 * 96 * 256)
    ((4, 96, 256), [0.5, 1.0, 0.5, 1.0], 4.25)
    """

    group = 32
    scale_dtype = jnp.float8_e8m0fnu
    scale_advice = (
        "Bytes of them (exponent + 127, as in checkpoints) are read as such by scales.view(jnp.float8_e8m0fnu), and "
        "not by astype, which would take a byte as the number; powers of two in another type by "
        "scales.astype(jnp.float8_e8m0fnu)."
    )

    values: Shaped[Array, "experts out in_or_half_in"]
    scales: Float[Array, "experts out groups"]
    through_e4m3: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def format(self) -> Format:
        """The same in the terms of layouts: what an array of such weights takes."""
        return Format(
            e2m1.ELEMENT, 1, self.group, self.scale_dtype, through_e4m3=self.through_e4m3, repacked=self.repacked
        )

    def _scale_parts(self) -> tuple[jax.Array, ...]:
        return e8m0.factors(self.scales)


@pytree
class NVFP4(FourBit):
    """A matrix for each expert in E2M1 with a scale in E4M3 for each 16 weights of an output, and one for the matrix.

    A weight is its value times the scale of its group of 16 inputs times the matrix's scale, as NVIDIA's ModelOpt
    writes checkpoints.

    Args:
      values: `float4_e2m1fn [experts, out, in]`, or two in a byte: `uint8 [experts, out, in / 2]` with the even index
        in the lower 4 bits. Or `uint32 [experts, out, in / 8]`, which `jaxmoe.repacked` makes.
      scales: `float8_e4m3fn [experts, out, in / 16]` (a checkpoint's `weight_scale`).
      global_scales: float32 `[experts]` (`weight_scale_2` of each matrix).
      through_e4m3: whether the weights are rounded to E4M3 beside rows in 8 bits, as `jaxmoe.through_e4m3` asks for.

    `shape` is that of the wide matrices, so that `Experts` with these arrays has the same sizes.

    >>> import jax.numpy as jnp
    >>> scales = jnp.full((4, 256, 6), 1.5, jnp.float8_e4m3fn)
    >>> w = NVFP4(jnp.full((4, 256, 48), 0x21, jnp.uint8), scales, jnp.full(4, 0.5))
    >>> w.shape, w.wide(jnp.bfloat16)[0, :4, 0].tolist()
    ((4, 96, 256), [0.375, 0.75, 0.375, 0.75])
    """

    group = 16
    scale_dtype = jnp.float8_e4m3fn
    scale_advice = "Bytes of them are read as such by scales.view(jnp.float8_e4m3fn)."

    values: Shaped[Array, "experts out in_or_half_in"]
    scales: Float[Array, "experts out groups"]
    global_scales: Float[Array, "experts"]
    through_e4m3: bool = dataclasses.field(default=False, metadata={"static": True})

    def check(self) -> None:
        """Raises where the arrays are not what the class says.

        Raises:
          TypeError: values or scales of other dtypes.
          ValueError: shapes that do not go together.
        """
        FourBit.check(self)
        given, experts = self.global_scales, self.values.shape[0]
        if given.dtype != jnp.float32:
            raise TypeError(f"NVFP4: global_scales are {given.dtype}; they must be float32, one for each expert.")
        if tuple(given.shape) != (experts,):
            raise ValueError(
                f"NVFP4: global_scales have shape {tuple(given.shape)}; they must be [experts], ({experts},): one for "
                "the matrix of each expert."
            )

    @property
    def format(self) -> Format:
        """The same in the terms of layouts: what an array of such weights takes."""
        return Format(
            e2m1.ELEMENT,
            1,
            self.group,
            self.scale_dtype,
            array_scale_dtype=jnp.float32,
            through_e4m3=self.through_e4m3,
            repacked=self.repacked,
        )

    @property
    def factors(self) -> Float[Array, "experts"] | None:
        """The scale of each matrix."""
        return self.global_scales

    def multiplied(self, dtype: DTypeLike) -> Float[Array, "experts in out"]:
        """Returns the same with the numbers that meet rows in 8 bits: rounded to E4M3, where that was asked for."""
        if not self.through_e4m3:
            return self.without_factors(dtype)
        products = self.without_factors(jnp.float32)
        return e4m3_blocks.rounded(products, jnp.asarray(self.scales), self.group).astype(dtype)

    def _scale_parts(self) -> tuple[jax.Array, ...]:
        return (self.scales.astype(jnp.float32),)
