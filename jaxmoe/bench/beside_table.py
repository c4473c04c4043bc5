"""A line of `python -m jaxmoe.bench beside`: what was measured of a program, as text and as JSON.

`beside.py` makes and prints them.
"""

import dataclasses
import json

from jaxmoe.bench.beside_programs import PROGRAMS

# A call may take this much longer than the layer and the other work one after the other: a tenth, and what one more
# wait between two streams costs, which shows where both are short.
SHARE, SLACK_US = 1.10, 20


def is_longer(program: float, layer: float, work: float) -> bool:
    """Whether a program takes longer than the layer and the other work one after the other, all in microseconds."""
    return program > SHARE * (layer + work) + SLACK_US


@dataclasses.dataclass(frozen=True)
class Result:
    """One line.

    Args:
      program: its name.
      tokens: per rank.
      ranks: of the program.
      processes: of the run.
      implementation: of the layer.
      device: its kind.
      jax: its version.
      failure: why there are no figures, `None` where there are.
      error: relative error of the other work's results against those of that work alone, the worst of them.
      microseconds: per call, median over windows, see `time_calls`.
      slowest: per call of the slowest window, microseconds.
      paused: of a program that was timed twice since a window of the first run took three times the median: per call
        of the slowest window of the run that does not count, microseconds.
      layer: time of all its calls of the layer alone, with the routing given, microseconds; where the program waits for
        the host, of calls that the host waits for.
      work: time of the other work alone, the router's among it, microseconds.
      work_slowest: per call of the slowest window of that, microseconds; where the program paused, in as much time.
      rounds: of a program whose single calls are longer than their parts (`is_longer`), or where the options ask for
        it, the same in rounds inside one jit (`beside_rounds.py`): of program, layer and work a round, microseconds.
    """

    program: str
    tokens: int
    ranks: int
    processes: int
    implementation: str
    device: str
    jax: str
    failure: str | None = None
    error: float | None = None
    microseconds: float | None = None
    slowest: float | None = None
    paused: float | None = None
    layer: float | None = None
    work: float | None = None
    work_slowest: float | None = None
    rounds: tuple[float, float, float] | None = None

    @property
    def ratio(self) -> float | None:
        """Time over that of layer and work one after the other; `None` where there are no figures."""
        if self.microseconds is None or self.layer is None or self.work is None:
            return None
        return self.microseconds / (self.layer + self.work)

    def to_json(self) -> str:
        """Returns the result as one line of JSON."""
        return json.dumps(dataclasses.asdict(self) | {"ratio": self.ratio}, allow_nan=False)


# Name, width and whether the column is flush left.
_COLUMNS = (
    ("program", 19, True),
    ("tokens", 6, False),
    ("checked", 7, False),
    ("median us", 9, False),
    ("slowest us", 10, False),
    ("layer alone", 11, False),
    ("work alone", 10, False),
    ("median / (layer + work)", 23, False),
    ("what the program stands for", 0, True),
)


def header() -> str:
    """Returns the names of the columns."""
    return _row([name for name, _, _ in _COLUMNS])


def line(result: Result) -> str:
    """Returns a result as a line of the table."""
    r = result
    if r.failure is not None:
        return f"{_row([r.program, str(r.tokens)])} {r.failure}"
    assert r.error is not None
    checked = "equal" if r.error == 0 else f"{r.error:.0e}"
    figures = [f"{time:.1f}" for time in (r.microseconds, r.slowest, r.layer, r.work)]
    remarks = [PROGRAMS[r.program].stands_for]
    if r.paused is not None:
        remarks.append(f"paused once, {r.paused:.1f}")
    if r.rounds is not None:
        program, layer, work = r.rounds
        parts = f"layer {layer:.1f}, work {work:.1f}"
        remarks.append(f"in rounds inside one jit {program:.1f}, {parts}: {program / (layer + work):.3f}")
    return _row([r.program, str(r.tokens), checked, *figures, f"{r.ratio:.3f}", "; ".join(remarks)])


def _row(cells: list[str]) -> str:
    columns = zip(cells, _COLUMNS, strict=False)
    return " ".join(f"{cell:<{width}}" if left else f"{cell:>{width}}" for cell, (_, width, left) in columns).rstrip()
