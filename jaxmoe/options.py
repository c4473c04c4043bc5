"""What a layer is called with: arrays, and everything else.

`moe_layer`, `explain` and the Flax layers take these one by one, and pass them on as the two types below.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.experts import Experts, FusedExperts
from jaxmoe.integers import saturated
from jaxmoe.routing.router import Routing
from jaxmoe.wording import a_type

ImplementationName = Literal["megakernel", "xla", "reference"]
Residuals = Literal["recompute", "save"]
Precision = Literal["fp8", "fp8-e8m0", "fp8-static", "w8a16", "w4a16"]
Accumulation = Literal["promoted", "fast"]


def check_implementation(caller: str, name: Any, none_chooses: bool = True) -> None:
    """Raises where there is no implementation of such a name.

    Args:
      caller: what the user called.
      name: as the user wrote it.
      none_chooses: `None` is one too.

    Raises:
      ValueError: an unknown name.
    """
    names = get_args(ImplementationName)
    if name in names or (none_chooses and name is None):
        return
    choice = ", or None to choose" if none_chooses else ""
    raise ValueError(
        f"{caller}: implementation={name!r} is not known. Use one of {', '.join(map(repr, names))}{choice}."
    )


class Arguments(NamedTuple):
    """The arrays of a call (or, leaf by leaf, their partition specs)."""

    x: Any
    topk_ids: Any
    topk_weights: Any
    experts: Any  # AnyExperts, which code that knows which ones would have to rule out at every use
    token_valid: Any = None

    @classmethod
    def given(
        cls, x: Any, topk_ids: Any, topk_weights: Any, experts: Any, token_valid: Any
    ) -> tuple["Arguments", int | None]:
        """Returns the arrays of a call, and of how many experts its routing says that they are, where it does.

        A `Routing` stands for ids and weights: `moe_layer(x, routing, experts)`.

        Raises:
          TypeError: there are no experts, or weights beside a `Routing`, which has its own.
        """
        routing = topk_ids if isinstance(topk_ids, Routing) else None
        if routing is not None:
            if experts is None:
                topk_weights, experts = None, topk_weights
            if topk_weights is not None:
                raise TypeError(
                    "moe_layer: topk_weights come beside a Routing, which has its own. Call moe_layer(x, routing, "
                    "experts)."
                )
            topk_ids, topk_weights = routing.topk_ids, routing.topk_weights
        if experts is None and isinstance(topk_weights, Experts | FusedExperts):
            raise TypeError(
                f"moe_layer: the third argument is {a_type(topk_weights)} and the second one is {a_type(topk_ids)}, no "
                "Routing. Call moe_layer(x, jaxmoe.route(logits, config), experts), or moe_layer(x, topk_ids, "
                "topk_weights, experts)."
            )
        if experts is None:
            raise TypeError(
                "moe_layer: there are no experts. Call moe_layer(x, routing, experts), or moe_layer(x, topk_ids, "
                "topk_weights, experts)."
            )
        return cls(x, topk_ids, topk_weights, experts, token_valid), routing and routing.scores.shape[-1]


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """What a call is given besides arrays, as the user wrote it: `moe_layer` documents it, `call.py` checks it."""

    activation: Any = "silu"
    axis_name: Any = "expert"
    data_axes: Any = None
    mesh: Any = None
    implementation: Any = None
    plan: Any = None
    residuals: Any = None
    precision: Any = None
    accumulation: Any = "promoted"
    network: Any = None
    hidden_axis: Any = None
    intermediate_axis: Any = None


def as_jax(tree: Any) -> Any:
    """Turns NumPy arrays into JAX arrays, of the dtype that JAX gives them (float64 is float32 without x64).

    Integers that this cannot hold become the nearest that it can, so that an id that is no expert stays none.
    """

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | np.generic):
            return leaf
        if np.issubdtype(leaf.dtype, np.integer):
            leaf = saturated(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
        return jnp.asarray(leaf)

    return jax.tree.map(of, tree)
