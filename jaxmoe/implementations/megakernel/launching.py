"""Calls of compiled code by all ranks of a group: what they have in common, whatever is computed.

`layer.py` calls it for a layer, `jaxmoe/exchange/kernel.py` for a dispatch or a combine.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxmoe import native
from jaxmoe.guard import first_derivatives_only
from jaxmoe.implementations.megakernel import lowering
from jaxmoe.sharding import ExpertGroup, replica_groups, vary_alike

# A wait inside the kernel that takes longer ends in an error that names the signal. On a CPU all ranks are threads of
# this process; on GPUs of several processes a rank may wait while another one's host reads data or writes a checkpoint.
TIMEOUT_SECONDS = {"cpu": 60.0, "gpu": 600.0}
# Environment variable that replaces both; read when a layer is traced.
TIMEOUT_VARIABLE = "JAXMOE_TIMEOUT_SECONDS"
# 31 years. Compiled code counts nanoseconds in 64 bits, beside those since the machine has started.
LONGEST_TIMEOUT_SECONDS = 1e9

_FIRST_DERIVATIVES = (
    "jaxmoe: implementation='megakernel' has first derivatives only (jax.grad, jax.vjp), and this asks for second "
    "ones. Pass implementation='xla' for those, to the dispatch where tokens are exchanged alone, and take jax.jvp of "
    "jax.grad."
)


def launch(
    target: str,
    order: Sequence[str],
    group: ExpertGroup,
    platform: str,
    attributes: dict[str, Any],
    operands: dict[str, jax.Array],
    results: dict[str, Any],
) -> dict[str, jax.Array]:
    """Calls compiled code on every rank of a group. What it may assume has to be checked before.

    Args:
      target: name of the FFI target.
      order: names of all arrays that its calls can have, operands before results.
      group: the ranks.
      platform: `"cpu"` or `"gpu"`.
      attributes: its own; those that every call has are added.
      operands: by name, without the place of the rank. What a call does not have is left out: arrays without elements
        in its place made XLA crash in a `lax.scan` (jax 0.11.2), and emit a kernel that the assembler refused, with
        experts over two GPUs (jax 0.12).
      results: their types, by name.

    Returns:
      The results by name.
    """
    operands = first_derivatives_only(operands, _FIRST_DERIVATIVES)
    operands = {"place": lowering.only_for(platform, place(group)), **operands}
    given = [name for name in order if name in operands]
    made = [name for name in order if name in results]
    bits = np.uint32(sum(1 << order.index(name) for name in (*given, *made)))
    attributes = {
        "version": native.version(),
        "ranks": np.int32(group.size),
        "timeout_seconds": np.float32(timeout_seconds(platform)),
        "groups": replica_groups(group, jax.sharding.get_abstract_mesh()).reshape(-1),
        "arrays": bits.view(np.int32),  # XLA has attributes with a sign, and the names of a layer fill all bits
        **attributes,
    }
    types = tuple(results[name] for name in made)
    if group.size > 1 and _several_processes() and lowering.can_name_devices():
        call = functools.partial(lowering.call, target, types, **attributes)
    else:
        call = functools.partial(jax.ffi.ffi_call(target, types), **attributes, devices=lowering.NOT_KNOWN)
    # The number of the group varies over every manual axis, and operands must vary alike. The results do not depend on
    # that number, so they vary as the inputs do.
    outputs = call(*vary_alike(tuple(operands[name] for name in given)))
    return dict(zip(made, outputs, strict=True))


def _several_processes() -> bool:
    """Whether ranks may be in other processes: only then do devices need names that all of them know.

    Programs whose calls name devices have to use one mesh, which JAX checks, and cannot be lowered without devices.
    """
    return jax.process_count() > 1


def place(group: ExpertGroup) -> Int32[Array, "2"]:
    """Returns this rank's position in its group, and the number of the group among those of the mesh."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    others = tuple(name for name in manual if name not in group.axis_names)
    number = jax.lax.axis_index(others) if others else jnp.int32(0)
    if group.parts:
        number = number * len(group.parts) + group.part()
    return jnp.stack(vary_alike((group.index(), number)))


def timeout_seconds(platform: str) -> float:
    """Returns how long a wait inside the kernel may take, from `JAXMOE_TIMEOUT_SECONDS` where that is set.

    Anything above `LONGEST_TIMEOUT_SECONDS` means that.

    Raises:
      ValueError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return TIMEOUT_SECONDS[platform]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{TIMEOUT_VARIABLE}={text!r} must be a positive number of seconds, such as 600.")
    return min(seconds, LONGEST_TIMEOUT_SECONDS)
