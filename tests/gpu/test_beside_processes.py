"""The layer beside everything else that a program does, with one process for each GPU.

`JAXMOE_TEST_SECONDS` is the time of each program, 3 where it is not set. One run serves all tests; `-k` picks programs
and numbers of tokens, such as `-k "loss and 1024"`. A failure of one process ends the run: the others wait for it.
"""

import pytest

from tests.gpu.beside_lines import (
    GPUS,
    MARKS,
    PROGRAMS,
    TOKENS,
    Lines,
    assert_no_longer_than_its_parts,
    assert_steady,
    selected,
)

pytestmark = [*MARKS, pytest.mark.parametrize("program", PROGRAMS), pytest.mark.parametrize("tokens", TOKENS)]


@pytest.fixture(scope="module")
def lines(request):
    return Lines(GPUS, selected(request.session, __name__))


def test_it_ends_and_returns_what_layer_and_other_work_return_alone(lines, tokens, program):
    lines.of(tokens, program)


def test_no_call_takes_three_times_the_median(lines, tokens, program):
    assert_steady(lines.of(tokens, program))


def test_it_takes_hardly_longer_than_layer_and_other_work_one_after_the_other(lines, tokens, program):
    assert_no_longer_than_its_parts(lines.of(tokens, program))
