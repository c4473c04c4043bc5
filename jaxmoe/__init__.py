"""jaxmoe: an expert-parallel Mixture-of-Experts layer for JAX.

`moe_layer` computes the layer for tokens that `route` has assigned to `Experts`. Flax layers are in `jaxmoe.nnx` and
`jaxmoe.linen`, `jaxmoe.convert` reads and writes checkpoints, `jaxmoe.testing` makes devices of a CPU: all are imported
when they are first used.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from jaxmoe.activation import SwiGLU
from jaxmoe.api import moe_layer
from jaxmoe.block_scaled import BlockScaled
from jaxmoe.call import RepeatedWorkWarning
from jaxmoe.e4m3_fit import fits_e4m3, through_e4m3
from jaxmoe.exchange.api import combine, dispatch
from jaxmoe.exchange.handle import Dispatched, Handle
from jaxmoe.exchange.matmul import dispatch_matmul, matmul_combine
from jaxmoe.exchange.started import Start, start_combine, start_dispatch
from jaxmoe.experts import Experts, FusedExperts
from jaxmoe.explain import Explanation, explain
from jaxmoe.four_bit import MXFP4, NVFP4, repacked
from jaxmoe.gpt_oss import experts_from_gpt_oss
from jaxmoe.health import LayerFailedError, failures, raise_if_failed
from jaxmoe.implementations.base import CHECKPOINT_NAMES
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.plan import KernelPlan, Plan, default_plan
from jaxmoe.quantization import dequantize, quantize, with_input_scales
from jaxmoe.routing import (
    MoEAux,
    MoEStats,
    RouterConfig,
    Routing,
    load_balancing_loss,
    load_stats,
    route,
    router_aux,
    router_z_loss,
    update_selection_bias,
)
from jaxmoe.stored_programs import export_checks, load_kernels

if TYPE_CHECKING:
    from jaxmoe import convert

try:
    __version__ = version("jaxmoe")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "CHECKPOINT_NAMES",
    "MXFP4",
    "NVFP4",
    "BlockScaled",
    "Dispatched",
    "Experts",
    "Explanation",
    "FusedExperts",
    "Handle",
    "KernelPlan",
    "LayerFailedError",
    "MoEAux",
    "MoEStats",
    "NetworkPlan",
    "Plan",
    "RepeatedWorkWarning",
    "RouterConfig",
    "Routing",
    "Start",
    "SwiGLU",
    "combine",
    "convert",
    "default_plan",
    "dequantize",
    "dispatch",
    "dispatch_matmul",
    "experts_from_gpt_oss",
    "explain",
    "export_checks",
    "failures",
    "fits_e4m3",
    "load_balancing_loss",
    "load_kernels",
    "load_stats",
    "matmul_combine",
    "moe_layer",
    "quantize",
    "raise_if_failed",
    "repacked",
    "route",
    "router_aux",
    "router_z_loss",
    "start_combine",
    "start_dispatch",
    "through_e4m3",
    "update_selection_bias",
    "with_input_scales",
]


# What is not needed by all, and imports more: Flax, or libraries that read checkpoints.
_LATER = ("convert", "linen", "nnx", "testing")


def __getattr__(name: str) -> Any:
    """Imports a module of `_LATER` when it is first used."""
    if name in _LATER:
        return importlib.import_module(f"jaxmoe.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names that users need."""
    return [*__all__, "__version__"]
