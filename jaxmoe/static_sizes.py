"""Refuses sizes that are not known while a program is traced: those of `jax.export.symbolic_shape`."""

from typing import Any

import jax


def check(caller: str, arrays: Any) -> None:
    """Raises a `ValueError` where an array of a pytree has a symbolic size, in the name of what the user called."""
    if not any(_symbolic(leaf) for leaf in jax.tree.leaves(arrays)):
        return
    path, leaf = next(item for item in jax.tree_util.tree_leaves_with_path(arrays) if _symbolic(item[1]))
    name = jax.tree_util.keystr(path).lstrip(".")
    raise ValueError(
        f"{caller}: {name} has shape {leaf.shape} with the symbolic size {_symbolic(leaf)[0]}; all sizes must be "
        "numbers, since buffers and the order of the work are made for them. Export once for each size, by "
        "jax.export.export(...) of jax.ShapeDtypeStruct with numbers, and fill a smaller batch up with tokens of which "
        "token_valid is False."
    )


def _symbolic(array: Any) -> list[Any]:
    return [
        size for size in getattr(array, "shape", ()) if not isinstance(size, int) and jax.export.is_symbolic_dim(size)
    ]
