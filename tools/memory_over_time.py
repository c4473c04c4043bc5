"""How busy memory is while a launch lasts, from samples that Nsight Compute has taken.

Usage: ncu -k regex:moe_forward --launch-skip 12 --launch-count 1 --clock-control none --pm-sampling-interval 1000
           --metrics pmsampling:dram__throughput.avg.pct_of_peak_sustained_elapsed -o report python PROGRAM
       ncu -i report.ncu-rep --page raw --csv --print-metric-instances values > samples.csv
       python tools/memory_over_time.py samples.csv

PROGRAM calls the layer some dozens of times, with XLA_PYTHON_CLIENT_PREALLOCATE=false. Any other metric that ncu
samples over time is read as well. Of each: the samples in percent, from the first to the last one above --idle, and
then how long it was below --low, and when. A launch is not seen before it reads, nor behind its last read. Without
--cache-control=none ncu empties the caches before a launch, which then begins more slowly than in a program.
"""

import argparse
import csv
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SAMPLED = "pmsampling:"
INTERVAL = "profiler__pmsampler_interval_time"
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3}
OF_A_LINE = 20  # samples


@dataclasses.dataclass(frozen=True)
class Series:
    """A metric in the course of a launch, in percent of its peak."""

    metric: str
    interval_us: float
    samples: tuple[float, ...]

    def busy(self, idle: float) -> "Series":
        """From the first to the last sample above `idle`."""
        above = [nth for nth, sample in enumerate(self.samples) if sample > idle]
        return dataclasses.replace(self, samples=self.samples[above[0] : above[-1] + 1] if above else ())

    def below(self, low: float) -> list[tuple[float, float]]:
        """When it was below `low`: beginnings and ends in microseconds."""
        found: list[tuple[float, float]] = []
        for is_low, group in itertools.groupby(enumerate(self.samples), lambda pair: pair[1] < low):
            if is_low:
                places = [nth for nth, _ in group]
                found.append((places[0] * self.interval_us, (places[-1] + 1) * self.interval_us))
        return found


def read(lines: Iterable[str]) -> list[Series]:
    """The metrics of the last launch in what ncu has written.

    Raises:
      ValueError: it has no samples over time, or none of how far they are apart.
    """
    rows = [row for row in csv.reader(line for line in lines if not line.startswith("==")) if row]
    if len(rows) < 3:
        raise ValueError("there is no launch: it needs --page=raw --csv.")
    names, units, values = rows[0], rows[1], rows[-1]
    of, unit_of = dict(zip(names, values, strict=True)), dict(zip(names, units, strict=True))
    samples_of = {name: _instances(value) for name, value in of.items() if name.startswith(SAMPLED)}
    if not any(samples_of.values()):
        raise ValueError(
            f"there are no samples over time: it needs --metrics={SAMPLED}METRIC, and --print-metric-instances=values."
        )
    # The value of the launch and those of its passes, which are the same.
    between = re.search(r"[\d.]+", of.get(INTERVAL, ""))
    unit = unit_of.get(INTERVAL, "")
    if between is None or unit not in MICROSECONDS:
        raise ValueError(
            f"{INTERVAL} is {of.get(INTERVAL)!r} in {unit!r}: it needs --page=raw, in {' or '.join(MICROSECONDS)}."
        )
    interval_us = float(between[0]) * MICROSECONDS[unit]
    return [Series(name.removeprefix(SAMPLED), interval_us, each) for name, each in samples_of.items() if each]


def _instances(value: str) -> tuple[float, ...]:
    """Of 'mean (first; second; ...)', where the mean may be left out."""
    _, _, instances = value.partition("(")
    return tuple(float(one) for one in instances.rstrip(")").split(";")) if instances else ()


def describe(series: Series, idle: float, low: float) -> Iterator[str]:
    """The lines to print."""
    busy = series.busy(idle)
    if not busy.samples:
        yield f"{series.metric}: never above {idle:g} %"
        return
    length = len(busy.samples) * busy.interval_us
    mean = sum(busy.samples) / len(busy.samples)
    yield f"{busy.metric}: {length:.1f} us, {mean:.1f} % on average, one sample in {busy.interval_us:g} us"
    for first in range(0, len(busy.samples), OF_A_LINE):
        percents = "".join(f"{sample:4.0f}" for sample in busy.samples[first : first + OF_A_LINE])
        yield f"{first * busy.interval_us:8.1f} us {percents}"
    times = busy.below(low)
    total = sum(end - begin for begin, end in times)
    when = "".join(f"  {begin:.1f}-{end:.1f}" for begin, end in times)
    yield f"below {low:g} % for {total:.1f} us:{when or ' never'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, help="what ncu has written as CSV")
    parser.add_argument("--idle", type=float, default=2.0, help="percent up to which samples at both ends are left out")
    parser.add_argument("--low", type=float, default=50.0, help="percent below which times are listed")
    arguments = parser.parse_args()
    try:
        with arguments.samples.open() as lines:
            found = read(lines)
    except ValueError as error:
        sys.exit(f"memory_over_time: {arguments.samples}: {error}")
    for series in found:
        for line in describe(series, arguments.idle, arguments.low):
            print(line)


if __name__ == "__main__":
    main()
