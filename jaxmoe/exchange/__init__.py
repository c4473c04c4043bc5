"""Dispatch and combine on their own, for experts that are computed by something else than `moe_layer`.

`api.py` has the two functions, `matmul.py` each with a product, `started.py` each as a start and a finish. What runs on
each rank is in the table below: `reference.py` (the truth), `xla.py` (portable) or `kernel.py` (compiled: a launch for
each).
"""

from jaxmoe.exchange import kernel, reference, xla
from jaxmoe.exchange.base import Implementation

XLA = Implementation("xla", xla.send, xla.add_up, xla.pull, xla.pull_weighted)
REFERENCE = Implementation("reference", reference.send, reference.add_up)
MEGAKERNEL = Implementation(
    "megakernel",
    kernel.send,
    kernel.add_up,
    kernel.pull,
    kernel.pull_weighted,
    kernel.send_matmul,
    kernel.matmul_add_up,
    kernel.start_send,
    kernel.start_add_up,
    kernel.finish,
    kernel.check,
    kernel.check_rows,
)
IMPLEMENTATIONS: dict[str, Implementation] = {each.name: each for each in (MEGAKERNEL, XLA, REFERENCE)}
