"""Whether what a call returned is right: everything that is compared in it, and the worst of that."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxmoe.bench.gradient_check import GradientInputs, errors_of
from jaxmoe.bench.inputs import Inputs, error_of
from jaxmoe.bench.passes import Results
from jaxmoe.bench.timing import over_processes


def compare(
    results: Results, number: int, inputs: Inputs, gradients: GradientInputs | None, mesh: Mesh
) -> list[tuple[str, float, float]]:
    """Returns name, error and allowed error of everything that is compared in the results of one set of inputs.

    Args:
      results: of the call.
      number: of the set.
      inputs: whose set it is.
      gradients: of the inputs; needed where the results have some.
      mesh: of one axis, over which the results are split.
    """
    errors = []
    if results.y is not None:
        sample = inputs.samples[number]
        errors.append(("y", error_of(results.y, sample, mesh), sample.allowed))
    if results.gradients is not None:
        assert gradients is not None
        errors += errors_of(results.gradients, gradients.samples[number], mesh)
    return errors


def worst_of(errors: Sequence[Sequence[tuple[str, float, float]]]) -> tuple[str, float, float, bool]:
    """Returns name, error and allowed error of what is worst in all sets, and whether all are allowed."""
    found = [each for of_set in errors for each in of_set]
    # NaN compares as neither larger nor smaller: it counts as infinitely wrong. And all processes decide alike, or
    # they would wait for each other.
    shares = np.nan_to_num(np.array([error / allowed for _, error, allowed in found]), nan=np.inf)
    worst = over_processes(shares).max(0)
    return (*found[int(worst.argmax())], bool(worst.max() <= 1))
