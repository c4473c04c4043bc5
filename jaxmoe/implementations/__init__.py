"""What `moe_layer` runs on each rank: `reference.py` (the truth), `xla/` (portable), `megakernel/` (fused).

Another implementation is another folder, and an entry in the table below.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax

from jaxmoe.experts import AnyExperts
from jaxmoe.implementations import reference
from jaxmoe.implementations.base import Call, Inputs, Shape
from jaxmoe.implementations.explanation import Explanation
from jaxmoe.implementations.megakernel import explain as kernel_explain
from jaxmoe.implementations.megakernel import layer as kernel_layer
from jaxmoe.implementations.megakernel import limits
from jaxmoe.implementations.megakernel.plan import KernelPlan
from jaxmoe.implementations.megakernel.plan_defaults import kernel_plan
from jaxmoe.implementations.xla import explain as xla_explain
from jaxmoe.implementations.xla import layer as xla_layer
from jaxmoe.implementations.xla.plan import Plan, xla_plan
from jaxmoe.options import ImplementationName, Residuals

AnyPlan = Plan | KernelPlan


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a layer.

    Args:
      name: of the user's argument.
      run: returns the output for the tokens of a rank.
      explain: what a call costs.
      default_plan: called with a shape and a platform.
      plan_type: of the plans that it takes.
      residuals: what its backward pass gets where the user does not say.
      check: raises where it cannot run a call; before anything runs.
      by_autodiff: it is JAX that differentiates it, and that keeps what it wants of the forward pass.
    """

    name: ImplementationName
    run: Callable[[Call, Inputs], jax.Array]
    explain: Callable[[Call], Explanation]
    default_plan: Callable[[Shape, str], AnyPlan]
    plan_type: type[Plan] | type[KernelPlan]
    residuals: Residuals = "save"
    check: Callable[[Call], None] = lambda call: None
    by_autodiff: bool = False


def _backward_of_decoded(call: Call, inputs: Inputs, dy: jax.Array) -> tuple[jax.Array, jax.Array, AnyExperts]:
    """The backward pass of `"xla"` for a forward pass of `"megakernel"`, which has none for experts in 8 bits."""
    plan = xla_plan(call.shape.wide, call.platform)
    return xla_layer.backward(dataclasses.replace(call, implementation="xla", plan=plan), inputs, dy)


_KERNEL_RUN = functools.partial(kernel_layer.run, backward_of_decoded=_backward_of_decoded)
MEGAKERNEL = Implementation(
    "megakernel", _KERNEL_RUN, kernel_explain.explain, kernel_plan, KernelPlan, "recompute", limits.check
)
XLA = Implementation("xla", xla_layer.run, xla_explain.explain, xla_plan, Plan)
# Takes the plans of "xla", and reads nothing of them.
REFERENCE = Implementation("reference", reference.run, reference.explain, xla_plan, Plan, by_autodiff=True)
IMPLEMENTATIONS: dict[str, Implementation] = {each.name: each for each in (MEGAKERNEL, XLA, REFERENCE)}
