"""One launch on one rank, role by role: what the models of forward and backward passes share (ffi/host/rank.h)."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.unit.agents_order import Agent, StaleRead, Until
from tests.unit.schedule_model import (
    WEIGHT_GRADIENTS,
    Problem,
    Signal,
    Site,
    all_tasks,
    filled_up,
    steps,
    waits_of,
    with_fields,
)

if TYPE_CHECKING:
    from tests.unit.agents_model import Group

ITEMSIZE = 2


class Launch(NamedTuple):
    """What all ranks run together. experts[rank][slot] is the expert that a slot names, -1 for none."""

    launch_number: int
    shape: Any
    schedule: Any
    experts: list[list[int]]
    crews: Sequence[tuple[int, int]] = ()  # workers and dispatchers of each rank, where they differ

    def schedule_of(self, rank: int) -> Any:
        if not self.crews:
            return self.schedule
        workers, dispatchers = self.crews[rank]
        return with_fields(self.schedule, workers=workers, dispatchers=dispatchers)


class Faults(NamedTuple):
    """What is planted. Waits that return at once are named by their site, by site and signal, or by the word as well:
    "dispatch", "dispatch answers_written", "dispatch answers_written[3]". Banks are those that do not change by parity.
    """

    skipped_waits: frozenset[str] = frozenset()
    one_bank: frozenset[str] = frozenset()
    dropped: Any = None  # a Task or Chunk of rank 0 that is not followed by its release


NO_FAULTS = Faults()
TORN = ("torn",)
Cell = tuple[int, int]  # rank, byte offset in its arena
Cells = dict[Cell, tuple[Any, ...]]
Origin = tuple[int, int]  # rank and slot that a row comes from


class Known(NamedTuple):
    """What the walks make of the rows of each expert."""

    rows_per_expert: list[int]
    tasks: list[Any]
    waits_before: Callable[[Any], list[Any]]


@dataclass
class RankLaunch:
    """One launch on one rank: what forward and backward passes share."""

    group: "Group"
    rank: int
    number: int

    def __post_init__(self):
        launch = self.group.launches[self.number]
        self.launch_number, self.shape, self.schedule = (
            launch.launch_number,
            launch.shape,
            launch.schedule_of(self.rank),
        )
        self.experts = launch.experts[self.rank]
        self.head = self.group.head
        self.layout = steps.layout_of(self.shape, self.schedule, steps.Formats.of("bfloat16"), self.head)
        self.regions = {name: offset for name, (offset, _) in (self.layout.head | self.layout.body).items()}
        self.sorters = steps.num_sorters(self.shape, self.schedule)
        self.answer_tiles = steps.answer_tiles(self.shape, self.schedule)
        self.known: Known | None = None

    # What a pass does its own way.

    def stage(self, worker: int) -> Agent:
        raise NotImplementedError

    def compute(self, worker: int, task) -> Agent:
        raise NotImplementedError

    def check_results(self) -> None:
        """Called when all tasks of the rank are done."""

    def add_up_for_peers(self, worker: int) -> Agent:
        """Called where sums are made at experts, when all tasks of the rank are done."""
        raise NotImplementedError

    def combine(self, worker: int) -> Agent:
        raise NotImplementedError

    def agents(self) -> dict[str, Agent]:
        agents = {"begin": self.begin()}
        for worker in range(self.schedule.workers):
            agents[f"worker {worker}"] = self.leaving(self.worker(worker))
        for dispatcher in range(self.schedule.dispatchers):
            agents[f"dispatcher {dispatcher}"] = self.leaving(self.dispatcher(dispatcher))
        return agents

    # A launch begins where the one before has ended on this rank, as kernels of one stream do.

    def begin(self) -> Agent:
        before = [launch.schedule_of(self.rank) for launch in self.group.launches[: self.number]]
        agents = sum(schedule.workers + schedule.dispatchers for schedule in before)
        yield Until(("left", self.rank), agents, self.rank, 0)
        assert min(self.group.begun) >= self.number, f"rank {self.rank} is two launches ahead of a peer"
        for word in self.bank(self.launch_number):
            assert self.group.words.values[word] == 0, f"rank {self.rank} finds a counter that is not clear"
        assert self.group.words.values[self.taken(self.launch_number)] == 0, (
            f"rank {self.rank} finds tasks that are taken"
        )
        self.group.begun[self.rank] += 1
        self.group.words.put(("begun", self.rank), self.number + 1)

    def leaving(self, agent: Agent) -> Agent:
        yield Until(("begun", self.rank), self.number + 1, self.rank, 0)
        yield from agent
        self.group.words.add(("left", self.rank), 1)

    # --- words and memory

    def word(self, rank: int, signal, index: int) -> Cell:
        launch_number = 0 if "counters" in self.group.faults.one_bank else self.launch_number
        return rank, steps.word_of(self.layout, self.head, launch_number, signal, index)

    def bank(self, launch_number: int) -> list[Cell]:
        launch_number = 0 if "counters" in self.group.faults.one_bank else launch_number % 2**32
        start = steps.word_of(self.layout, self.head, launch_number, Signal.histograms_written, 0)
        return [(self.rank, start + 4 * i) for i in range(steps.counter_words(self.head))]

    def counts_cell(self, owner: int, source: int) -> Cell:
        launch_number = 0 if "rows_from" in self.group.faults.one_bank else self.launch_number
        return owner, steps.rows_from_source(self.layout, self.head, launch_number, source)

    def slot_cell(self, owner: int, source: int, position: int) -> Cell:
        return owner, steps.slots_from_source(self.layout, self.head, source) + 4 * position

    @property
    def row_bytes(self) -> int:
        """Of a token, in a backward pass with the gradient of its output behind it: they go everywhere together."""
        return (2 if self.schedule.backward else 1) * self.shape.hidden * ITEMSIZE

    def token_cell(self, rank: int, token: int) -> Cell:
        return rank, self.regions["tokens"] + token * self.row_bytes

    def target_cell(self, ring_slot: int, tile_row: int) -> Cell:
        return self.rank, self.regions["row_targets"] + (ring_slot * self.schedule.tile.rows + tile_row) * 4

    def row_cell(self, ring_slot: int, tile_row: int) -> Cell:
        row = ring_slot * self.schedule.tile.rows + tile_row
        return self.rank, self.regions["rows"] + row * self.row_bytes

    def partial_cell(self, rank: int, slot: int, column_tile: int) -> Cell:
        column = column_tile * self.schedule.tile.columns
        return rank, self.regions["answers"] + (slot * self.shape.hidden + column) * ITEMSIZE

    def write(self, values: Mapping[Cell, tuple[Any, ...]]) -> Agent:
        self.group.memory.update(dict.fromkeys(values, TORN))
        yield
        self.group.memory.update(values)

    def read(self, wanted: Mapping[Cell, tuple[Any, ...]]) -> Generator[None, None, list[Any]]:
        """What cells hold behind the tags they have to begin with, which must be there before and after a pause."""
        self.look(wanted)
        yield
        return self.look(wanted)

    def look(self, wanted: Mapping[Cell, tuple[Any, ...]]) -> list[Any]:
        values = []
        for cell, tags in wanted.items():
            found = self.group.memory.get(cell, ("nothing",))
            if found[: len(tags)] != tags:
                raise StaleRead(
                    f"rank {self.rank} launch_number {self.launch_number} needs {tags} at {cell} and finds {found}"
                )
            values.append(found[-1])
        return values

    def until(self, site, agent: int, signal, index: int, target: int) -> Iterator[Until]:
        names = {site.name, f"{site.name} {signal.name}", f"{site.name} {signal.name}[{index}]"}
        if names.isdisjoint(self.group.faults.skipped_waits):
            wait = steps.Wait(signal, index, target)
            yield Until(self.word(self.rank, signal, index), target, self.rank, agent, site, wait)

    def release(self, signal, index: int = 0, amount: int = 1) -> None:
        self.group.words.add(self.word(self.rank, signal, index), amount)

    def release_to_all(self, signal) -> Agent:
        for peer in range(self.group.ranks):
            self.group.words.put(self.word(peer, signal, self.rank), self.launch_number)
            yield

    # --- a worker

    def worker(self, worker: int) -> Agent:
        for word in self.bank(self.launch_number + 1)[worker :: self.schedule.workers]:
            self.group.words.put(word, 0)
        if worker == 0:
            self.group.words.put(self.taken(self.launch_number + 1), 0)
        if worker < self.sorters:
            yield from self.sort(worker)
        yield from self.stage(worker)
        self.release(Signal.inputs_published)
        if worker == 0:
            yield from self.until(Site.publish, worker, Signal.inputs_published, 0, self.schedule.workers)
            yield from self.release_to_all(Signal.inputs_ready)
        counts = yield from self.wait_for_counts(worker)
        known = self.walks(counts)
        while (number := self.take_number()) < len(known.tasks):
            task = known.tasks[number]
            yield from self.before(self.site_of(task.gemm), worker, known.waits_before(task))
            yield from self.compute(worker, task)
            self.after(task)
        last = Signal.sums_written if self.schedule.summed_tiles else Signal.tasks_done
        if self.schedule.summed_tiles:
            self.release(Signal.tasks_done)
            yield from self.until(Site.combine, worker, Signal.tasks_done, 0, self.schedule.workers)
            yield from self.add_up_for_peers(worker)
        self.release(last)
        if worker == 0:
            yield from self.until(Site.announce, worker, last, 0, self.schedule.workers)
            self.check_results()
            yield from self.release_to_all(Signal.answers_ready)
        for source in range(self.group.ranks):
            yield from self.until(Site.combine, worker, Signal.answers_ready, source, self.launch_number)
        yield from self.combine(worker)

    @staticmethod
    def site_of(gemm) -> Any:
        return Site.weight_gradient if gemm in WEIGHT_GRADIENTS else Site.__members__[gemm.name]

    def taken(self, launch_number: int) -> Hashable:
        """The word with the number of the next task; there are two, by parity."""
        return "tasks taken", self.rank, launch_number % 2

    def take_number(self) -> int:
        number = self.group.words.values[self.taken(self.launch_number)]
        self.group.words.add(self.taken(self.launch_number), 1)
        return number

    def walks(self, counts: list[list[int]]) -> Known:
        """The stream, put together once for the counts that all workers and dispatchers read."""
        rows = filled_up(self.schedule, [sum(of_source) for of_source in zip(*counts, strict=True)])
        if self.known is None or self.known.rows_per_expert != rows:
            problem = Problem(self.shape, self.schedule, rows)
            self.known = Known(rows, all_tasks(problem), waits_of(problem))
        return self.known

    def token(self, token: int) -> tuple[Any, ...]:
        return "token", self.launch_number, self.rank, token

    def write_tokens(self, worker: int) -> Agent:
        tokens = range(worker, self.shape.tokens, self.schedule.workers)
        yield from self.write({self.token_cell(self.rank, token): self.token(token) for token in tokens})

    def sort(self, sorter: int) -> Agent:
        share = math.ceil(self.shape.slots / self.sorters)
        mine = range(self.shape.slots)[sorter * share : (sorter + 1) * share]
        histogram = Counter(self.experts[slot] for slot in mine)
        yield from self.write({self.histogram_cell(sorter): ("histogram", self.launch_number, histogram)})
        self.release(Signal.histograms_written)
        yield from self.until(Site.sort, sorter, Signal.histograms_written, 0, self.sorters)
        histograms = yield from self.read(
            {self.histogram_cell(other): ("histogram", self.launch_number) for other in range(self.sorters)}
        )
        local = self.shape.local_experts
        values = {}
        for owner in range(self.group.ranks):
            position = 0
            experts = range(owner * local, (owner + 1) * local)
            for expert in experts:
                before = position + sum(other[expert] for other in histograms[:sorter])
                for i, slot in enumerate(slot for slot in mine if self.experts[slot] == expert):
                    values[self.slot_cell(owner, self.rank, before + i)] = ("slot", self.launch_number, slot)
                position += sum(other[expert] for other in histograms)
            if sorter == 0:
                counts = [sum(other[expert] for other in histograms) for expert in experts]
                values[self.counts_cell(owner, self.rank)] = ("counts", self.launch_number, counts)
        yield from self.write(values)

    def histogram_cell(self, sorter: int) -> Cell:
        return self.rank, self.regions["histograms"] + sorter * self.shape.num_experts * 4

    def wait_for_counts(self, agent: int) -> Generator[Until | None, None, list[list[int]]]:
        """Rows from each source for each local expert."""
        for source in range(self.group.ranks):
            yield from self.until(Site.walk, agent, Signal.inputs_ready, source, self.launch_number)
        sources = range(self.group.ranks)
        return (
            yield from self.read(
                {self.counts_cell(self.rank, source): ("counts", self.launch_number) for source in sources}
            )
        )

    def before(self, site, agent: int, waits: Iterable[Any]) -> Iterator[Until]:
        for wait in waits:
            yield from self.until(site, agent, wait.signal, wait.index, wait.target)

    def after(self, item) -> None:
        if self.rank > 0 or item != self.group.faults.dropped:
            release = steps.release_after(item)
            self.release(release.signal, release.index, release.amount)

    # --- what tasks read

    def rows_of(self, row_tile: int, rows: int) -> dict[Cell, tuple[Any, ...]]:
        """The cells of a tile's rows, with what they have to begin with."""
        ring_slot = row_tile % self.schedule.ring_tiles
        return {self.row_cell(ring_slot, row): ("row", self.launch_number, row_tile, row) for row in range(rows)}

    def targets_of(self, row_tile: int, rows: int) -> dict[Cell, tuple[Any, ...]]:
        ring_slot = row_tile % self.schedule.ring_tiles
        return {self.target_cell(ring_slot, row): ("target", self.launch_number, row_tile, row) for row in range(rows)}

    def expert_of(self, task) -> int:
        """Among all experts of the group."""
        return self.rank * self.shape.local_experts + task.expert

    def my_slots(self, worker: int) -> Iterator[tuple[int, int]]:
        """(token, slot) of the slots in use that a worker combines."""
        for token in range(worker, self.shape.tokens, self.schedule.workers):
            for slot in range(token * self.shape.top_k, (token + 1) * self.shape.top_k):
                if self.experts[slot] >= 0:
                    yield token, slot

    # --- a dispatcher

    def dispatcher(self, dispatcher: int) -> Agent:
        counts = yield from self.wait_for_counts(dispatcher)
        known = self.walks(counts)
        for chunk in steps.chunks(self.shape, self.schedule, known.rows_per_expert, dispatcher):
            yield from self.before(Site.dispatch, dispatcher, known.waits_before(chunk))
            yield from self.pull(counts, chunk)
            self.after(chunk)

    def pull(self, counts: list[list[int]], chunk) -> Agent:
        slots = yield from self.slots_of(counts, chunk)
        values = {}
        for i, origin in enumerate(slots):
            row = chunk.tile_row + i
            tags = (self.launch_number, chunk.row_tile, row)
            target = None if origin is None else steps.pack_row_target(*self.target_of(chunk, row, origin))
            values[self.row_cell(chunk.ring_slot, row)] = ("row", *tags, self.token_of(origin))
            values[self.target_cell(chunk.ring_slot, row)] = ("target", *tags, target)
        read, noted = self.notes_of(chunk, slots)
        if self.layout.body["tokens"][1]:  # else one rank alone reads the caller's tokens
            tokens = [(origin[0], self.token_of(origin)) for origin in slots if origin]
            read |= {self.token_cell(source, token[-1]): token for source, token in tokens}
        yield from self.read(read)
        yield from self.write(values | noted)

    def token_of(self, origin: Origin | None) -> Any:
        """What a row holds of the slot that it comes from; None of a row of zeros."""
        return origin and ("token", self.launch_number, origin[0], origin[1] // self.shape.top_k)

    def target_of(self, chunk, tile_row: int, origin: Origin) -> Origin:
        """Rank and row of its answers where the answer to a row goes."""
        del chunk, tile_row
        return origin

    def notes_of(self, chunk, slots: list[Origin | None]) -> tuple[Cells, Cells]:
        """What else is read for the rows of a chunk, and written with them."""
        return {}, {}

    def slots_of(self, counts: list[list[int]], chunk) -> Generator[None, None, list[Origin | None]]:
        """Source and slot of each row of a chunk, None for rows of zeros behind the last one of the expert."""
        of_expert = [rows_from[chunk.expert] for rows_from in counts]
        starts = [sum(rows_from[: chunk.expert]) for rows_from in counts]
        sources = [
            steps.source_of_row(of_expert, row, self.rank)
            for row in range(chunk.first_row, chunk.first_row + chunk.rows)
        ]
        places = [at and (at.source, starts[at.source] + at.position) for at in sources]
        cells = [self.slot_cell(self.rank, *place) for place in places if place]
        slots = iter((yield from self.read(dict.fromkeys(cells, ("slot", self.launch_number)))))
        return [place and (place[0], next(slots)) for place in places]


def need(holds: bool, what: str) -> None:
    if not holds:
        raise StaleRead(what)


def same(values: list[Any], what: str) -> Any:
    """The one value that all are."""
    need(all(other == values[0] for other in values), what)
    return values[0]
