"""How the program `prefetch` is called: a thread of the host brings tokens while calls run. `beside.py` does it."""

import concurrent.futures
from typing import Any

import jax
import numpy as np

from jaxmoe.bench.beside_layer import Inputs, Outcome


class Prefetching:
    """Calls whose next tokens a thread of the host copies to the devices; it reads the last loss too.

    As a loop over batches does: a call takes the newest tokens that are there and waits for none.
    """

    def __init__(
        self,
        compiled: Any,
        inputs: Inputs,
        answers: Any,
        pool: concurrent.futures.ThreadPoolExecutor,
        tokens: np.ndarray,
    ) -> None:
        self.compiled, self.inputs, self.answers, self.pool, self.tokens = compiled, inputs, answers, pool, tokens
        self.next: concurrent.futures.Future[jax.Array] | None = None

    def __call__(self, _: int) -> Outcome:
        if self.next is not None and self.next.done():
            self.inputs, self.next = self.inputs._replace(x=self.next.result()), None
        outcome = self.compiled(self.inputs, self.answers)
        if self.next is None:
            self.next = self.pool.submit(self._bring, outcome.results["loss"])
        return outcome

    def _bring(self, loss: jax.Array) -> jax.Array:
        x = self.inputs.x
        there = jax.make_array_from_callback(x.shape, x.sharding, self.tokens.__getitem__)
        np.asarray(loss)
        return there
