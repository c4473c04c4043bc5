"""Values that a user's activation holds, and what is refused of them. `activation.py` calls both functions.

An activation is a constant of a compiled program, which is found by the object itself.
"""

import contextlib
import functools
import sys
import types
from typing import Any

import jax
from jax.core import Tracer

from jaxmoe.wording import a_type

# What a user does whose activation has values.
_ANY_CODE = (
    "To train such values, put the code of the activation between jaxmoe.dispatch_matmul and jaxmoe.matmul_combine, "
    "which take any JAX in between"
)


def refuse_own_values(activation: Any) -> None:
    """Raises of a module or another pytree with values, and of a method of one.

    It is the same object after its values have changed: a call would compute with those of the first one.

    Raises:
      TypeError: it is one.
    """
    owner = activation
    while isinstance(owner, functools.partial) and not isinstance(owner, jax.tree_util.Partial):
        owner = owner.func
    owner = getattr(owner, "__self__", owner)
    # Not every module of Flax NNX is a pytree. Before it is imported there are none.
    module = getattr(sys.modules.get("flax.nnx"), "Module", ())
    if isinstance(owner, module) or any(leaf is not owner for leaf in jax.tree.leaves(owner)):
        given = a_type(activation) if owner is activation else f"{a_type(activation)} of {a_type(owner)}"
        raise TypeError(
            f"moe_layer: activation is {given}, which has values of its own. The activation is a constant of the "
            "compiled program: values that change later would not get there, and have no gradients. "
            f"{_ANY_CODE}. If they are constants, pass a function that has them as numbers, such as "
            "functools.partial(jax.nn.leaky_relu, negative_slope=0.1)."
        )


def refuse_traced_values(function: Any, shown: str) -> None:
    """Raises where a function closes over values that JAX traces, as far as that can be seen.

    Args:
      function: of the user's.
      shown: how messages call it.

    Raises:
      TypeError: it does.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(_held_by(function))):
        raise TypeError(
            f"moe_layer: activation={shown} closes over a value that JAX traces (an argument of jax.jit, what "
            "is made of one, or what is differentiated), and the layer is differentiated: for that the activation has "
            f"to be a constant. {_ANY_CODE}, or pass implementation='reference', which is slow, with precision=None. A "
            "constant is a number of Python, or an array that was made outside of jax.jit."
        )


def _held_by(function: Any, seen: set[int] | None = None) -> list[Any]:
    """Returns what a function closes over or has as defaults, and the functions among that; or what the object that is
    called holds.

    Args:
      function: any callable.
      seen: those that were looked at, by their id; this one is added.
    """
    seen = set() if seen is None else seen
    seen.add(id(function))
    if isinstance(function, functools.partial):
        return [function.args, function.keywords, *_held_by(function.func, seen)]
    held = [getattr(getattr(function, "__self__", function), "__dict__", {})]
    held += [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            held.append(cell.cell_contents)
    # Not objects that can be called: what else they have may be traced, and has no part in this.
    for leaf in jax.tree.leaves(held):
        if isinstance(leaf, types.FunctionType | functools.partial) and id(leaf) not in seen:
            held += _held_by(leaf, seen)
    return held
