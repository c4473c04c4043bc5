"""`start_dispatch` and `start_combine`: both functions split in two, so that other work runs beside them.

For micro-batches in turn: one batch's tokens travel while the experts of the other one compute. `api.py` has the
functions that are split, `gradients.py` what runs on a rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Integer

from jaxmoe.exchange import IMPLEMENTATIONS, gradients
from jaxmoe.exchange.api import Answers, Tokens, dispatched, flat_answers, flat_tokens, nothing
from jaxmoe.exchange.base import ExchangeCall, ExchangePrecision
from jaxmoe.exchange.check import DispatchOptions, check_dispatch
from jaxmoe.exchange.check_combine import check_combine
from jaxmoe.exchange.entry import entered
from jaxmoe.exchange.handle import Dispatched, Handle
from jaxmoe.guard import not_mapped
from jaxmoe.options import ImplementationName, as_jax
from jaxmoe.pytrees import local_pytree
from jaxmoe.routing.router import Routing

# Of 132: what runs beside it keeps most of the GPU. docs/performance.md has figures with 16 and 24.
MULTIPROCESSORS = 24

Result = TypeVar("Result")
Work = TypeVar("Work")


@local_pytree
class Start(Generic[Result]):
    """A `dispatch` or a `combine` that is yet to start, with what runs beside it: `beside` or `finish` start it.

    On GPUs start and finish are two calls of compiled code under one `jax.jit`. What was started is not there before it
    is finished, and compiled code checks that nothing was copied in between, and raises if it was.

    Args:
      inputs: the arrays.
      start_of: what starts it.
      finish_of: what finishes it.
    """

    inputs: Any
    start_of: Callable[[Any], Any] = dataclasses.field(metadata={"static": True})
    finish_of: Callable[[Any], Any] = dataclasses.field(metadata={"static": True})

    def finish(self) -> Result:
        """Starts and finishes it, with nothing beside it: returns what `dispatch` or `combine` returns."""
        return self.finish_of(self.start_of(self.inputs))

    def beside(self, work: Callable[..., Work], *arguments: Any) -> tuple[Work, Result]:
        """Starts it, runs `work(*arguments)`, and finishes it; returns what the work returns, and what `finish` does.

        It starts when the arguments are there. The order that a program is written in says little to XLA: this keeps
        the start from being moved before what makes the arguments, and the work from leaving its place.
        """
        arguments, inputs = jax.lax.optimization_barrier((arguments, self.inputs))
        arguments, state = jax.lax.optimization_barrier((arguments, self.start_of(inputs)))
        results, state = jax.lax.optimization_barrier((work(*arguments), state))
        # Who uses the results alone has it finished all the same: what is started writes to memory of the program.
        return jax.lax.optimization_barrier((results, self.finish_of(state)))


def start_dispatch(
    x: Float[Array, "*batch hidden"],
    topk_ids: Integer[Array, "*batch top_k"] | Routing,
    *,
    num_experts: int | None = None,
    axis_name: str | Sequence[str] | None = "expert",
    capacity: int | None = None,
    alignment: int = 1,
    per_expert: bool = False,
    precision: ExchangePrecision | None = None,
    data_axes: str | Sequence[str] = (),
    token_valid: Bool[Array, "*batch"] | None = None,
    multiprocessors: int = MULTIPROCESSORS,
    mesh: Mesh | AbstractMesh | None = None,
    implementation: ImplementationName | None = None,
) -> Start[Dispatched]:
    """Returns a `dispatch` that other work can run beside, such as the experts of another micro-batch.

    As `"megakernel"` on GPUs the kernel runs on a stream of its own, on as many multiprocessors as it is given, while
    what follows in the program has the others. The gradient is that of `dispatch`, with nothing beside it. Where
    nothing can run beside the program (other implementations, CPUs) the start does all of it.

    Args:
      x: as of `dispatch`, and all arguments but one.
      topk_ids: the same.
      num_experts: the same.
      axis_name: the same.
      capacity: the same.
      alignment: the same.
      per_expert: the same.
      precision: the same.
      data_axes: the same.
      token_valid: the same.
      multiprocessors: of each GPU that the kernel takes, an even number from 2 to 64.
      mesh: the same.
      implementation: the same.

    Returns:
      `Start`, whose `finish` returns `Dispatched`.

    Raises:
      ValueError: as `dispatch`, and another number of multiprocessors.
      TypeError: as `dispatch`.
      NotImplementedError: as `dispatch`.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> @jax.jit
    ... def two_batches(x, topk_ids, matrices):
    ...     send = lambda x: jaxmoe.start_dispatch(x, topk_ids, num_experts=3, axis_name=None)
    ...     experts = lambda sent: jax.lax.ragged_dot(sent.rows, matrices, sent.group_sizes)
    ...     first = send(x[0]).finish()
    ...     outputs, second = send(x[1]).beside(experts, first)  # one travels, the other one computes
    ...     back = jaxmoe.start_combine(outputs, None, first.handle)
    ...     others, y = back.beside(experts, second)
    ...     return y, jaxmoe.combine(others, None, second.handle)
    >>> x, topk_ids = jnp.arange(12.0).reshape(2, 3, 2), jnp.array([[2, 0], [0, -1], [2, 2]])
    >>> [float(y.sum()) for y in two_batches(x, topk_ids, jnp.stack([jnp.eye(2)] * 3))]
    [25.0, 85.0]
    """
    x, topk_ids, token_valid = as_jax((x, topk_ids, token_valid))
    options = DispatchOptions(
        num_experts,
        axis_name,
        capacity,
        alignment,
        per_expert,
        precision,
        data_axes,
        mesh,
        implementation,
        "start_dispatch",
        multiprocessors,
    )
    call = check_dispatch(x, topk_ids, token_valid, options)
    ids = topk_ids.topk_ids if isinstance(topk_ids, Routing) else topk_ids
    arrays = jax.tree.map(functools.partial(not_mapped, caller="start_dispatch"), Tokens(x, ids, token_valid))
    return Start(arrays, _compiled(call, _start_dispatch_on_rank), _compiled(call, _finish_dispatch_on_rank))


def start_combine(
    outputs: Float[Array, "*places width"],
    topk_weights: Float[Array, "*batch top_k"] | None,
    handle: Handle,
    *,
    multiprocessors: int = MULTIPROCESSORS,
) -> Start[Float[Array, "*batch width"]]:
    """Returns a `combine` that other work can run beside: see `start_dispatch`, which has an example.

    Args:
      outputs: as of `combine`.
      topk_weights: the same.
      handle: the same.
      multiprocessors: of each GPU that the kernel takes, an even number from 2 to 64.

    Returns:
      `Start`, whose `finish` returns `y`.

    Raises:
      ValueError: as `combine`, and another number of multiprocessors.
      TypeError: as `combine`.
      NotImplementedError: as `combine`.
    """
    outputs, topk_weights, handle = as_jax((outputs, topk_weights, handle))
    call = check_combine(outputs, topk_weights, handle, "start_combine", multiprocessors=multiprocessors)
    answers = Answers(outputs, topk_weights, handle.row_sources, handle.slot_rows)
    answers = jax.tree.map(functools.partial(not_mapped, caller="start_combine"), answers)
    return Start(answers, _compiled(call, _start_combine_on_rank), _compiled(call, _finish_combine_on_rank))


@functools.lru_cache(maxsize=4096)
def _compiled(call: ExchangeCall, on_rank: Callable[[ExchangeCall, Any], Any]) -> Callable[[Any], Any]:
    return entered(call, functools.partial(on_rank, call))


def _start_dispatch_on_rank(call: ExchangeCall, tokens: Tokens) -> Any:
    x, ids = flat_tokens(call, tokens)
    started = None
    if call.shape.tokens:
        started = gradients.start_dispatch(IMPLEMENTATIONS[call.implementation], call, x, ids)
    return tokens.x, ids.reshape(*tokens.x.shape[:-1], call.shape.top_k), started


def _finish_dispatch_on_rank(call: ExchangeCall, state: Any) -> Dispatched:
    x, ids, started = state
    x, ids, batch = x.reshape(-1, call.shape.hidden), ids.reshape(-1, call.shape.top_k), x.shape[:-1]
    if started is None:
        arrived, decoded = nothing(call, x, ids)
    else:
        arrived, decoded = gradients.finish_dispatch(IMPLEMENTATIONS[call.implementation], call, x, started)
    return dispatched(call, arrived, ids, batch, decoded)


def _start_combine_on_rank(call: ExchangeCall, answers: Answers) -> Any:
    started = None
    if call.shape.tokens:
        started = gradients.start_combine(IMPLEMENTATIONS[call.implementation], call, *flat_answers(call, answers))
    return answers, started


def _finish_combine_on_rank(call: ExchangeCall, state: Any) -> jax.Array:
    answers, started = state
    batch, width = answers.slot_rows.shape[:-1], answers.outputs.shape[-1]
    if started is None:
        return gradients.vary(call, (jnp.zeros((*batch, width), answers.outputs.dtype), answers))[0]
    flat = flat_answers(call, answers)
    y = gradients.finish_combine(IMPLEMENTATIONS[call.implementation], call, *flat, started)
    return y.reshape(*batch, width)
