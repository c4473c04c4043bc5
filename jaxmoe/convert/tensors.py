"""The tensors of one block of a checkpoint: found by name, checked, and counted, so that none is overlooked."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.arrays import is_array


class Block:
    """What a mapping of names to arrays has below one stem, such as `model.layers.3.mlp.`."""

    def __init__(self, tensors: Mapping[str, Any], stem: str, hint: Callable[[], str] = str) -> None:
        """`hint` is asked for what else to say where a tensor is missing."""
        self._tensors = tensors
        self._stem, self._hint = stem, hint
        self._names = {name for name in tensors if name.startswith(stem)}
        # Of each tensor that was asked for: a mapping may load it every time.
        self._asked: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}

    def name(self, below: str) -> str:
        """Returns the whole name of a tensor."""
        return f"{self._stem}{below}"

    def __contains__(self, below: str) -> bool:
        return self.name(below) in self._names

    def has_below(self, part: str) -> bool:
        """Whether there is any tensor of a part of the block."""
        return any(name.startswith(f"{self._stem}{part}.") for name in self._names)

    def unread(self) -> list[str]:
        """Returns the names below the stem that nobody has asked for."""
        return sorted(self._names - set(self._asked))

    def _beside(self, name: str) -> str:
        near = sorted(other for other in self._names if other.startswith(f"{name.rpartition('.')[0]}."))
        return ", ".join(other.rpartition(".")[2] for other in near[:8])

    def dtype(self, below: str, needed: str) -> np.dtype:
        """Returns the dtype of a tensor.

        Raises:
          ValueError: it is missing.
          TypeError: it is no array of NumPy or JAX.
        """
        name = self.name(below)
        if name in self._asked:
            return self._asked[name][0]
        if name not in self._names:
            beside = self._beside(name)
            raise ValueError(
                f"from_hf: tensor {name!r} is missing; it must be {needed}."
                f"{f' Beside it there are {beside}.' if beside else ''} {self._hint()}".rstrip()
            )
        array = self._tensors[name]
        if not is_array(array):
            raise TypeError(
                f"from_hf: tensor {name!r} is a {type(array).__module__}.{type(array).__name__}; pass NumPy or JAX "
                "arrays, or the path of the checkpoint."
            )
        self._asked[name] = np.dtype(array.dtype), tuple(array.shape)
        return self._asked[name][0]

    def same_dtype(
        self, names: Sequence[str], suffix: str, types: Iterable[Any], words: str, advice: str = ""
    ) -> np.dtype:
        """Returns the dtype that a tensor of all these matrices has.

        Raises:
          ValueError: one is missing.
          TypeError: one is of none of the types, or of another one than the first.
        """
        allowed = [np.dtype(kind) for kind in types]
        needed = f"{', '.join(map(str, allowed[:-1]))}{' or ' if allowed[1:] else ''}{allowed[-1]} {words}"
        tensors = [f"{name}.{suffix}" if name else suffix for name in names]
        first = self.dtype(tensors[0], needed)
        if first not in allowed:
            raise TypeError(
                f"from_hf: tensor {self.name(tensors[0])!r} is {first}; it must be {needed}. {advice}".rstrip()
            )
        for tensor in tensors[1:]:
            if (found := self.dtype(tensor, needed)) != first:
                raise TypeError(
                    f"from_hf: tensor {self.name(tensor)!r} is {found}, and {self.name(tensors[0])!r} is {first}; "
                    "experts of a layer must be alike."
                )
        return first

    def check(self, below: str, shape: tuple[int, ...], needed: str) -> None:
        """Raises a `ValueError` where a tensor whose dtype is known has another shape.

        One number may also lie in a dimension of one.
        """
        if not self.fits(below, shape):
            found = list(self.found_shape(below))
            raise ValueError(
                f"from_hf: tensor {self.name(below)!r} has shape {found}; it must be {list(shape)}: {needed}."
            )

    def fits(self, below: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor whose dtype is known has a shape, or is one number as that is."""
        found = self.found_shape(below)
        return found == shape or (math.prod(shape) == 1 and found in ((), (1,)))

    def found_shape(self, below: str) -> tuple[int, ...]:
        """Returns the shape of a tensor whose dtype is known."""
        return self._asked[self.name(below)][1]

    def shape(
        self, below: str, types: Iterable[Any], shape: tuple[int | None, ...], words: str, advice: str = ""
    ) -> tuple[int, ...]:
        """Returns the shape of a tensor of one of the types; `None` in what it must be is any size.

        Raises:
          TypeError, ValueError: it is missing, or is not what it must be.
        """
        stem, _, suffix = below.rpartition(".")
        self.same_dtype([stem], suffix, types, words, advice)
        found = self._asked[self.name(below)][1]
        fits = len(found) == len(shape) and all(b in (None, a) for a, b in zip(found, shape, strict=True))
        if not fits or 0 in found:
            raise ValueError(f"from_hf: tensor {self.name(below)!r} has shape {list(found)}; it must be {words}.")
        return found

    def checked(
        self, below: str, types: Iterable[Any], shape: tuple[int | None, ...], words: str, advice: str = ""
    ) -> np.ndarray:
        """Returns a tensor, checked as by `shape`."""
        self.shape(below, types, shape, words, advice)
        return self.array(below)

    def array(self, below: str) -> np.ndarray:
        """Returns a tensor that has been checked."""
        return np.asarray(self._tensors[self.name(below)])
