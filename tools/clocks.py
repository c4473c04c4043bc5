"""What clock a GPU had and what power it took while a program ran, from samples that nvidia-smi has taken.

Usage: nvidia-smi --query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active --format=csv -lms 20 > CSV &
       PROGRAM
       kill %1; python tools/clocks.py CSV

Of the samples in which the GPU took more than --watts: clock and power that a tenth, half and nine tenths of them are
at or below, and in how many of them the driver says that power, or heat, held the clock down. All GPUs that nvidia-smi
lists are taken together: choose one with -i.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

CLOCK, POWER, REASONS = ".sm", "power.draw", "event_reasons"  # in titles of columns
# Bits of the reasons, as NVML has them: limits of software and of hardware.
BY_POWER = 0x04 | 0x80
BY_HEAT = 0x20 | 0x40


@dataclasses.dataclass(frozen=True)
class Sample:
    """Of one moment."""

    megahertz: float
    watts: float
    reasons: int


def read(lines: Iterable[str]) -> list[Sample]:
    """What nvidia-smi has written; its last line may be cut off.

    Raises:
      ValueError: a column is missing.
    """
    rows = csv.reader(lines, skipinitialspace=True)
    header = next(rows, [])

    def column(name: str) -> int:
        found = [nth for nth, title in enumerate(header) if name in title]
        if not found:
            raise ValueError(f"there is no column {name}; the first line is {', '.join(header) or 'empty'}.")
        return found[0]

    places = [column(name) for name in (CLOCK, POWER, REASONS)]
    samples = []
    for row in rows:
        if len(row) < len(header):
            continue
        clock, power, reasons = (row[place] for place in places)
        try:
            samples.append(Sample(float(clock.split()[0]), float(power.split()[0]), int(reasons, 16)))
        except ValueError:
            continue  # "[N/A]" while a driver starts
    return samples


def quantiles(numbers: Sequence[float]) -> str:
    """Those that a tenth, half and nine tenths are at or below."""
    ordered = sorted(numbers)
    return " ".join(f"{ordered[int(part * (len(ordered) - 1))]:.0f}" for part in (0.1, 0.5, 0.9))


def describe(samples: Sequence[Sample], watts: float) -> Iterator[str]:
    """The lines that are printed."""
    busy = [sample for sample in samples if sample.watts > watts]
    yield f"{len(busy)} of {len(samples)} samples above {watts:g} W"
    if not busy:
        return
    yield f"clock {quantiles([sample.megahertz for sample in busy])} MHz"
    yield f"power {quantiles([sample.watts for sample in busy])} W"
    for name, bits in (("power", BY_POWER), ("heat", BY_HEAT)):
        yield f"held down by {name} in {sum(bool(sample.reasons & bits) for sample in busy)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, help="what nvidia-smi has written as CSV")
    parser.add_argument("--watts", type=float, default=350.0, help="what a GPU takes that has work")
    arguments = parser.parse_args()
    try:
        with arguments.samples.open() as lines:
            samples = read(lines)
    except ValueError as error:
        sys.exit(f"clocks: {arguments.samples}: {error}")
    for line in describe(samples, arguments.watts):
        print(line)


if __name__ == "__main__":
    main()
