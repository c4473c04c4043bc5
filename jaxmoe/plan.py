"""How a layer of one shape is computed: everything that may be swept without changing the result beyond rounding.

There is one kind of plan for each implementation that has choices: `Plan` for `"xla"`, `KernelPlan` for `"megakernel"`.
The implementations read it, `explain` prints it.
"""

from typing import Literal, overload

from jaxmoe.implementations import IMPLEMENTATIONS, AnyPlan
from jaxmoe.implementations.base import Shape
from jaxmoe.implementations.megakernel.plan import KernelPlan
from jaxmoe.implementations.xla.plan import Plan
from jaxmoe.options import check_implementation

__all__ = ["AnyPlan", "KernelPlan", "Plan", "Shape", "default_plan"]


@overload
def default_plan(shape: Shape, platform: str, implementation: Literal["xla", "reference"] = ...) -> Plan: ...
@overload
def default_plan(shape: Shape, platform: str, implementation: Literal["megakernel"]) -> KernelPlan: ...
@overload
def default_plan(shape: Shape, platform: str, implementation: str) -> AnyPlan: ...


def default_plan(shape: Shape, platform: str, implementation: str = "xla") -> AnyPlan:
    """Returns the plan for a shape on a platform, with the reason of every choice.

    Args:
      shape: sizes of the call, with the formats of its arrays; that of a call is `jaxmoe.explain(...).call.shape`.
      platform: `"cpu"`, `"gpu"` (or `"cuda"`), ...
      implementation: that the plan is for: a `KernelPlan` for `"megakernel"`, a `Plan` for the others.

    Raises:
      ValueError: there is no such implementation.

    >>> import jaxmoe
    >>> from jaxmoe.plan import Shape
    >>> mixtral = Shape(tokens=8192, hidden=4096, intermediate=14336, num_experts=8, top_k=2, ranks=4)
    >>> jaxmoe.default_plan(mixtral, "cpu").batch_rows
    20480
    >>> jaxmoe.default_plan(mixtral, "gpu", "megakernel").unit_tiles
    12
    """
    check_implementation("default_plan", implementation, none_chooses=False)
    return IMPLEMENTATIONS[implementation].default_plan(shape, platform)
