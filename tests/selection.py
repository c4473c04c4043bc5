"""Which tests run where not all do: the options `--every` and `--cases` of conftest.py."""

import collections
from collections.abc import Sequence

import pytest


def of_every(items: Sequence[pytest.Item], every: int) -> list[pytest.Item]:
    """Returns the first of each `every` tests of a file, in their order."""
    counts: collections.Counter[object] = collections.Counter()
    kept: list[pytest.Item] = []
    for item in items:
        if counts[item.path] % every == 0:
            kept.append(item)
        counts[item.path] += 1
    return kept


def of_cases(items: Sequence[pytest.Item], cases: int, turn: int) -> list[pytest.Item]:
    """Returns one of each `cases` cases of every test: its parameters, and the classes that run it.

    What a suite asks of `"xla"` and of `"reference"` is one test, as is what it asks of two kinds of Flax layers; what
    it asks of compiled code (tests/host) is another. All that are marked `slow` are one. Each case has its turn; a test
    marked `all_cases` keeps them all.
    """

    def test_of(item: pytest.Item) -> object:
        if "slow" in item.keywords:
            return "slow"
        function = getattr(item, "function", item)
        of_compiled_code = "host" in item.path.parts
        return function, (item.path, getattr(item, "cls", None)) if of_compiled_code else None

    kept = {item for item in items if "all_cases" in item.keywords}
    cases_of: dict[object, list[pytest.Item]] = {}
    for item in items:
        cases_of.setdefault(test_of(item), []).append(item)
    for each in cases_of.values():
        kept.update(each[turn % min(cases, len(each)) :: cases])
    return [item for item in items if item in kept]
