"""What tools/memory_over_time.py says of samples; they are written here, so nothing runs on a GPU."""

import pytest

from tests.tool_modules import load_tool

memory_over_time = load_tool("memory_over_time")

METRIC = "pmsampling:dram__throughput.avg.pct_of_peak_sustained_elapsed"


def page(samples: str, interval: str = "1.50 (1.50; 1.50)", unit: str = "us") -> list[str]:
    return [
        "==PROF== Connected",
        f'"ID","Kernel Name","{METRIC}","profiler__pmsampler_interval_time"',
        f'"","","%","{unit}"',
        f'"0","moe_forward","{samples}","{interval}"',
    ]


@pytest.mark.parametrize("samples", ["30.5 (0; 80; 40.5)", "(0; 80; 40.5)"])
def test_samples_are_read_with_and_without_their_mean(samples: str):
    (series,) = memory_over_time.read(page(samples))
    assert series.samples == (0, 80, 40.5)
    assert series.interval_us == 1.5


def test_an_interval_in_nanoseconds_is_one_in_microseconds():
    (series,) = memory_over_time.read(page("(1; 2)", interval="1000", unit="ns"))
    assert series.interval_us == 1


def test_idle_samples_at_both_ends_are_left_out_and_those_between_are_not():
    (series,) = memory_over_time.read(page("(0; 1; 50; 0; 0; 90; 2; 0)"))
    assert series.busy(2).samples == (50, 0, 0, 90)


def test_times_below_a_percentage_have_their_begin_and_end():
    (series,) = memory_over_time.read(page("(90; 10; 20; 90; 49)"))
    assert series.below(50) == [(1.5, 4.5), (6.0, 7.5)]


def test_the_lines_say_when_memory_was_busy_and_how_much():
    (series,) = memory_over_time.read(page("(0; 60; 20; 100; 0)"))
    first, samples, low = memory_over_time.describe(series, idle=2, low=50)
    assert first.endswith("4.5 us, 60.0 % on average, one sample in 1.5 us")
    assert samples.split() == ["0.0", "us", "60", "20", "100"]
    assert low == "below 50 % for 1.5 us:  1.5-3.0"


def test_a_launch_that_reads_nothing_is_said_to_be_idle():
    (series,) = memory_over_time.read(page("(0; 1; 0)"))
    (line,) = memory_over_time.describe(series, idle=2, low=50)
    assert line.endswith("never above 2 %")


@pytest.mark.parametrize(
    "lines",
    [
        *([], ["==ERROR== no kernel was found"], page("30.5")),
        *(page("(1; 2)", interval=""), page("(1; 2)", unit="cycle")),
    ],
)
def test_a_page_without_samples_is_refused_with_what_to_ask_for(lines: list[str]):
    with pytest.raises(ValueError, match="it needs --"):
        memory_over_time.read(lines)
