"""What tools/clocks.py says of samples; they are written here, so nothing runs on a GPU."""

import pytest

from tests.tool_modules import load_tool

clocks = load_tool("clocks")

HEADER = "clocks.current.sm [MHz], power.draw.instant [W], clocks_event_reasons.active"
SAMPLES = [
    "345 MHz, 80.43 W, 0x0000000000000001",
    *["1905 MHz, 700.10 W, 0x0000000000000004"] * 3,
    "[N/A], [N/A], 0x0000000000000000",
    "1980 MHz, 640.00 W, 0x0000000000000000",
    "1200 MHz, 400.00 W, 0x0000000000000020",
    "1980 MHz, 64",
]


def test_samples_without_numbers_and_a_last_line_that_is_cut_off_are_left_out():
    found = clocks.read([HEADER, *SAMPLES])
    assert len(found) == 6
    assert found[1] == clocks.Sample(1905.0, 700.1, 4)


def test_clock_power_and_what_held_them_down_are_those_of_samples_with_work():
    assert list(clocks.describe(clocks.read([HEADER, *SAMPLES]), watts=350)) == [
        "5 of 6 samples above 350 W",
        "clock 1200 1905 1905 MHz",
        "power 400 700 700 W",
        "held down by power in 3",
        "held down by heat in 1",
    ]


def test_of_a_gpu_without_work_there_is_nothing_to_say():
    assert list(clocks.describe(clocks.read([HEADER, SAMPLES[0]]), watts=350)) == ["0 of 1 samples above 350 W"]


@pytest.mark.parametrize("lines", [[], ["clocks.current.sm [MHz], power.draw.instant [W]", *SAMPLES]])
def test_a_file_without_a_column_is_refused_with_its_name(lines):
    with pytest.raises(ValueError, match=r"no column (\.sm|event_reasons)"):
        clocks.read(lines)
