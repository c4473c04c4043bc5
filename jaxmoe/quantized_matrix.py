"""What all narrow types of the matrices of `Experts` have in common: values whose scales lie beside them.

`block_scaled.py` and `four_bit.py` are those types. What `moe_layer` does with them is in `precision.py`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from jaxmoe.formats import Format, bits

# Numbers whose largest has less than this are scaled as if it had this: their scale would not be a normal number.
SMALLEST = 2.0**-100


class QuantizedMatrix:
    """A matrix for each expert as values of few bits times scales that many of them share.

    A type of them has fields `values` `[experts, out, in]` and `scales`: that is how checkpoints lie, and the transpose
    of the wide matrices of `Experts`.
    """

    # Of a value.
    bits: ClassVar[int]
    values: Any
    scales: Any

    def check(self) -> None:
        """Raises where the arrays are not what the class says.

        Raises:
          TypeError: dtypes.
          ValueError: shapes.
        """
        raise NotImplementedError

    @property
    def transposition(self) -> str:
        """What to do where the arrays lie as [experts, in, out], in words."""
        return (
            "Values that lie as [experts, in, out] have to be transposed, and scales with them: values.swapaxes(1, 2), "
            "scales.swapaxes(1, 2)."
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """`[experts, in, out]`, as `Experts` has it."""
        *experts, out, inner = self.values.shape
        return *experts, inner, out

    @property
    def dtype(self) -> Any:
        """Of the values."""
        return self.values.dtype

    @property
    def format(self) -> Format:
        """The same in the terms of layouts: what an array of such weights takes."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales, where values lie packed."""
        return sum(leaf.size * bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(self))

    def wide(self, dtype: DTypeLike) -> Any:
        """Returns the matrices as `Experts` has them, `[experts, in, out]`."""
        raise NotImplementedError


def leaves_of(array: Any) -> list[Any]:
    """Returns what a field of experts is made of: itself, or the fields of a quantised matrix that it has.

    That is what `jax.tree.leaves` returns of arrays, and also what stands in their place and JAX takes for no leaf.
    """
    if not isinstance(array, QuantizedMatrix):
        return [array]
    fields = [field for field in dataclasses.fields(array) if not field.metadata.get("static")]  # pyright: ignore[reportArgumentType]
    leaves = ((field, getattr(array, field.name)) for field in fields)
    return [leaf for field, leaf in leaves if leaf is not None or field.default is not None]
