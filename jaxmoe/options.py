"""What a layer is called with: arrays, and everything else.

`moe_layer`, `explain` and the Flax layers take these one by one, and pass them on as the two types below.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

from jaxmoe.experts import Experts

ImplementationName = Literal["megakernel", "xla", "reference"]
Residuals = Literal["recompute", "save"]
Precision = Literal["fp8", "fp8-e8m0", "w8a16", "w4a16"]


class Arguments(NamedTuple):
    """The arrays of a call (or, leaf by leaf, their partition specs)."""

    x: Any
    topk_ids: Any
    topk_weights: Any
    experts: Experts
    token_valid: Any = None


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """What a call is given besides arrays, as the user wrote it: `moe_layer` documents it, `call.py` checks it."""

    activation: Any = "silu"
    axis_name: Any = "expert"
    data_axes: Any = ()
    mesh: Any = None
    implementation: Any = None
    plan: Any = None
    residuals: Any = None
    precision: Any = None
    network: Any = None
