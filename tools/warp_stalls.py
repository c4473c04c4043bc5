"""What warps of a kernel wait for, loop by loop, from samples that Nsight Compute has taken.

Usage: ncu -k regex:moe_forward --launch-skip 12 --launch-count 1 --clock-control none --set none
           --section SourceCounters --section SpeedOfLight --warp-sampling-interval 0 -o report python PROGRAM
       ncu -i report.ncu-rep --page details                             has the Elapsed Cycles of the launch
       ncu -i report.ncu-rep --page source --csv --print-units base > samples.csv
       python tools/warp_stalls.py samples.csv --cycles=CYCLES

PROGRAM calls the layer some dozens of times, with XLA_PYTHON_CLIENT_PREALLOCATE=false: ncu saves what a launch writes.

A loop is what a branch jumps back over; of loops in one another the inner one, unless it seldom runs. Of each: how
often a warp of the launch goes through it, on average over all warps; how many instructions that are and how many
cycles it takes one; and for how many of these the warp waited for what, by the names of Nsight Compute. 'selected' is
an issue slot taken, 'unnamed' a wait without a column there, such as a product's for all warps of its warpgroup. Then
come the same of stretches outside of these loops, instructions that lie side by side and run about as often as the
first of them, such as an epilogue; and the instructions outside of loops that cost most. How often an instruction runs
is counted in a launch of its own, which is slower: that is wrong for loops that poll.

A program: python tools/compare_builds.py installed --case=mxfp4-a16:64,2880,2880,64,4 --results=FOLDER
"""

import argparse
import csv
import dataclasses
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

STALL = "stall_"
UNNAMED = "unnamed"  # waits that have no column
# Instructions. What is longer is the loop over tasks, or a jump back from code that the compiler has put at the end.
LONGEST_LOOP = 2048


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the source page."""

    address: int
    text: str
    executed: int  # by how many warps in all
    stalls: Counter[str]  # samples

    @property
    def samples(self) -> int:
        return self.stalls.total()

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"\bBRA(?:\.\w+)*\s+(?:\w+,\s*)?(0x[0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None


@dataclasses.dataclass(frozen=True)
class Piece:
    """Instructions `first` to `last`: a loop, or a stretch that is none; all of them are a pass through it."""

    first: int
    last: int
    executed: int  # passes of all warps

    def holds(self, other: "Piece") -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


def read(lines: Iterable[str]) -> list[Instruction]:
    """The instructions of the first kernel in what ncu has written.

    Raises:
      ValueError: it has no samples.
    """
    rows = itertools.dropwhile(lambda row: row[:1] != ["Address"], csv.reader(lines))
    names = next(rows, [])
    stalls = [name for name in names if name.startswith(STALL) and "(" not in name]
    found: list[Instruction] = []
    for row in itertools.takewhile(lambda row: len(row) == len(names), rows):
        of = dict(zip(names, row, strict=True))
        counts = Counter({name.removeprefix(STALL): int(of[name] or 0) for name in stalls})
        counts[UNNAMED] = int(of.get("# Samples") or 0) - counts.total()
        executed = int(of.get("Instructions Executed") or 0)
        found.append(Instruction(int(of["Address"], 16), of["Source"].strip(), executed, counts))
    if not any(instruction.samples for instruction in found):
        raise ValueError("there are no samples: it needs --section=SourceCounters, and --page=source --csv.")
    return found


def find_loops(code: Sequence[Instruction]) -> list[Piece]:
    """Loops that have run, without those that are only part of one, or only hold one."""
    place = {instruction.address: nth for nth, instruction in enumerate(code)}
    found = set[Piece]()
    for last, branch in enumerate(code):
        first = None if branch.target is None else place.get(branch.target)
        if first is not None and first <= last < first + LONGEST_LOOP and branch.executed:
            found.add(Piece(first, last, branch.executed))

    def is_part(loop: Piece) -> bool:
        return any(other.holds(loop) and 2 * loop.executed <= other.executed for other in found)

    def only_holds(loop: Piece) -> bool:
        return any(loop.holds(other) and not is_part(other) for other in found)

    return [loop for loop in found if not is_part(loop) and not only_holds(loop)]


def find_stretches(code: Sequence[Instruction], outside: Sequence[int]) -> list[Piece]:
    """The instructions numbered in `outside`, cut into stretches.

    Those of a stretch lie side by side, and run from half to twice as often as its first one.
    """
    found: list[Piece] = []
    for nth in outside:
        executed = code[nth].executed
        last = found[-1] if found else None
        if last and last.last + 1 == nth and last.executed <= 2 * executed <= 4 * last.executed:
            found[-1] = dataclasses.replace(last, last=nth)
        elif executed:
            found.append(Piece(nth, nth, executed))
    return found


def describe(code: Sequence[Instruction], cycles: int | None, loops: int, stretches: int, others: int) -> Iterator[str]:
    """The lines to print: that many loops, and that many stretches and instructions outside of them."""
    warps = code[0].executed
    samples = sum(instruction.samples for instruction in code)
    # Each warp is sampled equally often, whether it runs or waits.
    per_sample = warps * cycles / samples if cycles else None

    def waits(stalls: Counter[str], passes: float) -> str:
        if per_sample is None:
            return "  ".join(f"{name} {count / stalls.total():.0%}" for name, count in stalls.most_common(6) if count)
        of_pass = ((name, count * per_sample / passes) for name, count in stalls.most_common())
        return "  ".join(f"{name} {long:.0f}" for name, long in of_pass if long >= 1)

    yield f"{len(code)} instructions, {warps} warps, {samples} samples"

    def stalls_of(piece: Piece) -> Counter[str]:
        return sum((instruction.stalls for instruction in code[piece.first : piece.last + 1]), Counter[str]())

    def lines_of(kind: str, pieces: Iterable[Piece], most: int) -> Iterator[str]:
        by_samples = sorted(((stalls_of(piece), piece) for piece in pieces), key=lambda pair: -pair[0].total())
        for stalls, piece in by_samples[:most]:
            instructions = sum(i.executed for i in code[piece.first : piece.last + 1]) / piece.executed
            length = "" if per_sample is None else f", {stalls.total() * per_sample / piece.executed:.0f} cycles"
            yield (
                f"{kind} {piece.first}-{piece.last}: {stalls.total() / samples:.1%} of samples, "
                f"{piece.executed / warps:.1f} passes of {instructions:.0f} instructions{length}: "
                f"{waits(stalls, piece.executed)}"
            )

    in_loops = find_loops(code)
    yield from lines_of("loop", in_loops, loops)
    inside = {nth for loop in in_loops for nth in range(loop.first, loop.last + 1)}
    outside = [nth for nth in range(len(code)) if nth not in inside]
    yield from lines_of("stretch", find_stretches(code, outside), stretches)
    outside.sort(key=lambda nth: -code[nth].samples)
    for nth in outside[:others]:
        one = code[nth]
        if one.samples:
            yield (
                f"{nth}: {one.samples / samples:.1%} of samples, {one.executed / warps:.1f} times, {one.text}: "
                f"{waits(one.stalls, max(one.executed, 1))}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, help="what ncu has written as CSV")
    parser.add_argument("--cycles", type=int, help="Elapsed Cycles of the launch; without it waits are shares")
    parser.add_argument("--loops", type=int, default=12, help="that are listed at most")
    parser.add_argument("--stretches", type=int, default=20, help="outside of them that are listed at most")
    parser.add_argument("--others", type=int, default=20, help="instructions outside of them that are listed at most")
    arguments = parser.parse_args()
    try:
        with arguments.samples.open() as lines:
            code = read(lines)
    except ValueError as error:
        sys.exit(f"warp_stalls: {arguments.samples}: {error}")
    for line in describe(code, arguments.cycles, arguments.loops, arguments.stretches, arguments.others):
        print(line)


if __name__ == "__main__":
    main()
