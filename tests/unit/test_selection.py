"""Which tests the gate leaves out, and when their turn is."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.selection import of_cases


@dataclasses.dataclass(frozen=True)
class Item:
    """What the choice reads of a test of pytest's."""

    path: Path
    cls: str
    function: str
    case: int
    keywords: tuple[str, ...] = ()


def case_of(path: str, cls: str, function: str, case: int, *keywords: str) -> Item:
    return Item(Path("tests", path), cls, function, case, keywords)


SUITE = [case_of("unit/a.py", cls, "of the suite", case) for cls in ("Xla", "Reference") for case in range(5)]
COMPILED = [case_of("host/b.py", cls, "of the suite", case) for cls in ("Bf16", "F16") for case in range(4)]
ALONE = [case_of("unit/c.py", "", "alone", 0)]
MARKED = [case_of("unit/d.py", "", "marked", case, "all_cases") for case in range(4)]
SLOW = [case_of(f"unit/{file}.py", "", f"slow {file}", 0, "slow") for file in "efghijk"]
ALL: Any = [*SUITE, *COMPILED, *ALONE, *MARKED, *SLOW]


@pytest.mark.parametrize("cases", [2, 3, 7])
def test_every_case_has_its_turn_and_no_test_is_left_out_in_any(cases):
    turns: Any = [of_cases(ALL, cases, turn) for turn in range(cases * 11)]
    assert set().union(*turns) == set(ALL)
    for kept in map(set, turns):
        assert kept & set(SUITE)
        assert all(any(item.cls == cls for item in kept & set(COMPILED)) for cls in ("Bf16", "F16"))
        assert kept >= {*ALONE, *MARKED}
        assert len(kept & set(SLOW)) in (7 // cases, 7 // cases + 1)


def test_of_many_cases_it_takes_one_of_that_many_in_their_order():
    kept = of_cases(ALL, 3, 1)
    assert [item for item in kept if item in SUITE] == SUITE[1::3]
    assert kept == [item for item in ALL if item in set(kept)]
