"""A model of ranks that run launches of the kernel, with one Python generator for each worker and dispatcher.

Order, waits, releases and offsets all come from the compiled code (`native.schedule()`), so a test that runs the model
tests that code. What the model adds is time: `run` resumes one agent at a time in an order that a test draws, and every
write lasts from one resumption to a later one. What is read carries the launch and the place it was written for; a
reader looks before and after a pause, so memory that is reused too early is found (`StaleRead`). Agents that wait for
each other in a circle are found too (`Stuck`).

The agents follow ffi/host/executor.cc role by role.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import hypothesis.strategies as st

from jaxmoe import native

steps = native.schedule()
Signal = steps.Signal
Site = steps.Site
Gemm = steps.Gemm

ITEMSIZE = 2


# --- sizes, as hypothesis draws them ----------------------------------------------------------------------------------


WORKERS = st.integers(1, 132)
RANKS = st.integers(1, 8)
TILE_ROWS = st.sampled_from([1, 2, 3, 8, 16])


class Problem(NamedTuple):
    """A layer, a legal schedule for it, and the rows that one rank receives."""

    shape: Any
    schedule: Any
    rows_per_expert: list[int]


def least_ring(shape, schedule) -> int:
    """The fewest ring tiles that are legal."""
    return min(schedule.min_ring_tiles, steps.max_row_tiles(shape, schedule))


def with_fields(struct, **changes):
    """A copy of a Shape or Schedule with some fields changed."""
    names = ["ranks", "tokens", "hidden", "intermediate", "num_experts", "top_k"]
    if isinstance(struct, steps.Schedule):
        names = ["tile", "unit_tiles", "lag_units", "ring_tiles", "workers", "chunk_rows", "dispatchers"]
        names += ["narrow_rows", "keep_tokens"]
    return type(struct)(**{name: getattr(struct, name) for name in names} | changes)


@st.composite
def schedules(draw, shape, *, workers=WORKERS, dispatchers=WORKERS, tile_rows=TILE_ROWS):
    """Any legal schedule for a shape; as many ring tiles as are needed, or a few more."""
    rows = draw(tile_rows)
    schedule = steps.Schedule(
        tile=steps.TileSizes(rows, draw(st.integers(4, 24)), draw(st.integers(4, 24))),
        unit_tiles=draw(st.integers(1, 5)),
        lag_units=draw(st.integers(0, 3)),
        ring_tiles=1,
        workers=draw(workers),
        chunk_rows=draw(st.integers(1, rows + 1)),
        dispatchers=draw(dispatchers),
        narrow_rows=draw(st.just(0) | st.integers(0, rows)),
        keep_tokens=draw(st.integers(0, 1)),
    )
    return with_fields(schedule, ring_tiles=least_ring(shape, schedule) + draw(st.integers(0, 3)))


@st.composite
def rows_of_experts(draw, num_experts, most=40, huge=150):
    """Rows of each local expert: often none, sometimes one expert with far more than the others."""
    counts = st.integers(1, most) | st.integers(0, most)
    rows = draw(st.lists(counts, min_size=num_experts, max_size=num_experts))
    if draw(st.booleans()):
        rows[draw(st.integers(0, num_experts - 1))] = draw(st.integers(most, huge))
    return rows


@st.composite
def problems(draw, *, ranks=RANKS, most=40, huge=150, **schedule_options):
    """A layer whose slots suffice for the rows drawn, so that `max_row_tiles` has to bound them."""
    num_ranks = draw(ranks)
    local_experts = draw(st.integers(1, 6))
    rows = draw(rows_of_experts(local_experts, most, huge))
    top_k = draw(st.integers(1, 8))
    shape = steps.Shape(
        ranks=num_ranks,
        tokens=math.ceil(sum(rows) / (num_ranks * top_k)),
        hidden=draw(st.integers(1, 48)),
        intermediate=draw(st.integers(1, 48)),
        num_experts=local_experts * num_ranks,
        top_k=top_k,
    )
    return Problem(shape, draw(schedules(shape, **schedule_options)), rows)


# --- the stream of one rank, put together from its walks --------------------------------------------------------------


def columns_of(task) -> range:
    """The column tiles that a task computes."""
    return range(task.column_tile, task.column_tile + task.column_tiles)


def all_tasks(problem: Problem) -> list[Any]:
    """The tasks of a rank in stream order: `steps.tasks` deals them to the workers in turn."""
    walks = [steps.tasks(*problem, worker) for worker in range(problem.schedule.workers)]
    return [walk[turn] for turn in range(len(walks[0])) for walk in walks if turn < len(walk)]


def all_chunks(problem: Problem) -> list[Any]:
    """The chunks of all dispatchers in stream order."""
    walks = [steps.chunks(*problem, dispatcher) for dispatcher in range(problem.schedule.dispatchers)]
    return sorted((chunk for walk in walks for chunk in walk), key=lambda chunk: (chunk.row_tile, chunk.tile_row))


def stream(problem: Problem) -> list[Any]:
    """All chunks and tasks of a rank: the pulls of a unit stand right before its gate/up tasks."""
    chunks = defaultdict(list)
    for chunk in all_chunks(problem):
        chunks[chunk.row_tile].append(chunk)
    first_tiles = {unit.first_tile: unit for unit in steps.units(problem.schedule, problem.rows_per_expert)}
    items = []
    for task in all_tasks(problem):
        unit = first_tiles.get(task.row_tile)
        if unit and task.gemm == Gemm.gate_up and task.column_tile == 0:
            for row_tile in range(unit.first_tile, unit.first_tile + unit.tiles):
                items += chunks.pop(row_tile)
        items.append(task)
    assert not chunks, "every tile that is pulled is computed"
    return items


def waits_that_point_forward(problem: Problem) -> list[Any]:
    """The waits of the stream whose target is not reached, to the last release, by what stands before them."""
    released = Counter()
    forward = []
    for item in stream(problem):
        wait = steps.wait_before(problem.shape, problem.schedule, item)
        if wait and released[wait.signal, wait.index] != wait.target:
            forward.append(wait)
        release = steps.release_after(item)
        released[release.signal, release.index] += release.amount
    return forward


# --- agents in a drawn order ------------------------------------------------------------------------------------------


class Until(NamedTuple):
    """What an agent yields to wait for a word. Everything but `word` and `target` is for the message."""

    word: Hashable
    target: int
    rank: int
    agent: int
    site: Any = None
    wait: Any = None


Agent = Generator[Until | None, None, None]  # None is a pause


class StaleRead(AssertionError):
    """Something was read that is not, or no longer, what its reader needs."""


class Stuck(AssertionError):
    """No agent can go on. `waits` are those that are not met, with the value seen."""

    def __init__(self, blocked: list[tuple[Until, int]]):
        self.waits = [(until.wait, seen) for until, seen in blocked if until.wait]
        failures = [(steps.WaitFailure(u.rank, u.agent, u.site, u.wait, seen), 10.0) for u, seen in blocked if u.wait]
        super().__init__("\n".join(steps.describe(failure, seconds, "worker") for failure, seconds in failures))


class Words:
    """Words of 32 bits that agents wait for; zero at first."""

    def __init__(self):
        self.values = defaultdict(int)
        self.changed = []

    def add(self, word: Hashable, amount: int) -> None:
        self.put(word, (self.values[word] + amount) % 2**32)

    def put(self, word: Hashable, value: int) -> None:
        self.values[word] = value
        self.changed.append(word)


class Order(NamedTuple):
    """An interleaving: the ready agent of the highest priority goes on, and after each step its priority may change.

    Few changes make some agents very late and others very early, which is what finds faults.
    """

    seed: int
    restlessness: float


orders = st.builds(Order, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.2, 1.0]))


def run(agents: Mapping[str, Agent], words: Words, order: Order) -> None:
    """Runs all agents to their ends. Raises `Stuck` where none can go on, and whatever an agent raises."""
    random = Random(order.seed)
    ready = [(random.random(), name) for name in agents]
    heapq.heapify(ready)
    wanted: dict[str, Until | None] = dict.fromkeys(agents)
    blocked: dict[Hashable, list[tuple[float, str]]] = defaultdict(list)
    while ready:
        priority, name = heapq.heappop(ready)
        until = wanted[name]
        if until and not steps.has_reached(words.values[until.word], until.target):
            blocked[until.word].append((priority, name))
            continue
        try:
            wanted[name] = next(agents[name])
        except StopIteration:
            pass
        else:
            if random.random() < order.restlessness:
                priority = random.random()
            heapq.heappush(ready, (priority, name))
        for word in words.changed:
            for entry in blocked.pop(word, ()):
                heapq.heappush(ready, entry)  # its wait is looked at again when its turn comes
        words.changed.clear()
    late = [wanted[name] for entries in blocked.values() for _, name in entries]
    if late:
        raise Stuck([(until, words.values[until.word]) for until in late if until])


# --- ranks and launches -----------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """What all ranks run together. experts[rank][slot] is the expert that a slot names, -1 for none."""

    epoch: int
    shape: Any
    schedule: Any
    experts: list[list[int]]


class Faults(NamedTuple):
    """What is planted. Sites are names of waits that return at once; banks are those that do not change by parity."""

    skipped_sites: frozenset[str] = frozenset()
    one_bank: frozenset[str] = frozenset()
    dropped: Any = None  # a Task or Chunk of rank 0 that is not followed by its release


NO_FAULTS = Faults()
TORN = ("torn",)
Cell = tuple[int, int]  # rank, byte offset in its arena


def head_for(launches: Iterable[Launch]) -> Any:
    """The least head that has room for all launches."""
    heads = [steps.needed_head(launch.shape, launch.schedule) for launch in launches]
    return steps.HeadCapacity(
        ranks=heads[0].ranks,
        local_experts=max(head.local_experts for head in heads),
        row_tiles=max(head.row_tiles for head in heads),
        slots=max(head.slots for head in heads),
    )


class Group:
    """Ranks that run the same launches one after the other, each at its own pace."""

    def __init__(self, launches: list[Launch], faults: Faults = NO_FAULTS):
        self.launches = launches
        self.faults = faults
        self.head = head_for(launches)
        self.ranks = self.head.ranks
        self.words = Words()
        self.memory: dict[Cell, tuple[Any, ...]] = {}
        self.begun = [0] * self.ranks  # launches
        before = (launches[0].epoch - 1) % 2**32  # every flag holds the epoch of the launch before
        first = RankLaunch(self, 0, 0)
        for rank in range(self.ranks):
            for source in range(self.ranks):
                for signal in (Signal.inputs_ready, Signal.partials_written):
                    self.words.put(first.word(rank, signal, source), before)

    def agents(self) -> dict[str, Agent]:
        return {
            f"rank {rank} launch {number} {name}": agent
            for rank in range(self.ranks)
            for number in range(len(self.launches))
            for name, agent in RankLaunch(self, rank, number).agents().items()
        }

    def run(self, order: Order) -> None:
        run(self.agents(), self.words, order)


@dataclass
class RankLaunch:
    """One launch on one rank."""

    group: Group
    rank: int
    number: int

    def __post_init__(self):
        self.epoch, self.shape, self.schedule, experts = self.group.launches[self.number]
        self.experts = experts[self.rank]
        self.head = self.group.head
        self.layout = steps.layout_of(self.shape, self.schedule, self.head, ITEMSIZE)
        self.regions = {name: offset for name, (offset, _) in (self.layout.head | self.layout.body).items()}
        self.planners = steps.num_planners(self.shape, self.schedule)
        self.hidden_tiles = steps.hidden_tiles(self.shape, self.schedule)
        self.output_tiles = steps.output_tiles(self.shape, self.schedule)
        self.known_tasks: tuple[list[int], list[Any]] | None = None

    def agents(self) -> dict[str, Agent]:
        agents = {"begin": self.begin()}
        for worker in range(self.schedule.workers):
            agents[f"worker {worker}"] = self.leaving(self.worker(worker))
        for dispatcher in range(self.schedule.dispatchers):
            agents[f"dispatcher {dispatcher}"] = self.leaving(self.dispatcher(dispatcher))
        return agents

    # A launch begins where the one before has ended on this rank, as kernels of one stream do.

    def begin(self) -> Agent:
        before = self.group.launches[: self.number]
        agents = sum(launch.schedule.workers + launch.schedule.dispatchers for launch in before)
        yield Until(("left", self.rank), agents, self.rank, 0)
        assert min(self.group.begun) >= self.number, f"rank {self.rank} is two launches ahead of a peer"
        for word in self.bank(self.epoch):
            assert self.group.words.values[word] == 0, f"rank {self.rank} finds a counter that is not clear"
        assert self.group.words.values[self.taken(self.epoch)] == 0, f"rank {self.rank} finds tasks that are taken"
        self.group.begun[self.rank] += 1
        self.group.words.put(("begun", self.rank), self.number + 1)

    def leaving(self, agent: Agent) -> Agent:
        yield Until(("begun", self.rank), self.number + 1, self.rank, 0)
        yield from agent
        self.group.words.add(("left", self.rank), 1)

    # --- words and memory

    def word(self, rank: int, signal, index: int) -> Cell:
        epoch = 0 if "counters" in self.group.faults.one_bank else self.epoch
        return rank, steps.word_of(self.layout, self.head, epoch, signal, index)

    def bank(self, epoch: int) -> list[Cell]:
        epoch = 0 if "counters" in self.group.faults.one_bank else epoch % 2**32
        start = steps.word_of(self.layout, self.head, epoch, Signal.histograms_written, 0)
        return [(self.rank, start + 4 * i) for i in range(steps.counter_words(self.head))]

    def counts_cell(self, owner: int, source: int) -> Cell:
        epoch = 0 if "rows_from" in self.group.faults.one_bank else self.epoch
        return owner, steps.rows_from_source(self.layout, self.head, epoch, source)

    def slot_cell(self, owner: int, source: int, position: int) -> Cell:
        return owner, steps.slots_from_source(self.layout, self.head, source) + 4 * position

    def token_cell(self, rank: int, token: int) -> Cell:
        return rank, self.regions["tokens"] + token * self.shape.hidden * ITEMSIZE

    def target_cell(self, ring_slot: int, tile_row: int) -> Cell:
        return self.rank, self.regions["row_targets"] + (ring_slot * self.schedule.tile.rows + tile_row) * 4

    def row_cell(self, ring_slot: int, tile_row: int) -> Cell:
        row = ring_slot * self.schedule.tile.rows + tile_row
        return self.rank, self.regions["rows"] + row * self.shape.hidden * ITEMSIZE

    def hidden_cell(self, ring_slot: int, column_tile: int) -> Cell:
        first_row = ring_slot * self.schedule.tile.rows
        column = column_tile * self.schedule.tile.hidden_columns
        return self.rank, self.regions["hidden"] + (first_row * self.shape.intermediate + column) * ITEMSIZE

    def partial_cell(self, rank: int, slot: int, column_tile: int) -> Cell:
        column = column_tile * self.schedule.tile.output_columns
        return rank, self.regions["partials"] + (slot * self.shape.hidden + column) * ITEMSIZE

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
                raise StaleRead(f"rank {self.rank} epoch {self.epoch} needs {tags} at {cell} and finds {found}")
            values.append(found[-1])
        return values

    def until(self, site, agent: int, signal, index: int, target: int) -> Iterator[Until]:
        if site.name not in self.group.faults.skipped_sites:
            wait = steps.Wait(signal, index, target)
            yield Until(self.word(self.rank, signal, index), target, self.rank, agent, site, wait)

    def release(self, signal, index: int = 0, amount: int = 1) -> None:
        self.group.words.add(self.word(self.rank, signal, index), amount)

    def release_to_all(self, signal) -> Agent:
        for peer in range(self.group.ranks):
            self.group.words.put(self.word(peer, signal, self.rank), self.epoch)
            yield

    # --- a worker

    def worker(self, worker: int) -> Agent:
        for word in self.bank(self.epoch + 1)[worker :: self.schedule.workers]:
            self.group.words.put(word, 0)
        if worker == 0:
            self.group.words.put(self.taken(self.epoch + 1), 0)
        if worker < self.planners:
            yield from self.plan(worker)
        if self.group.ranks > 1:
            tokens = range(worker, self.shape.tokens, self.schedule.workers)
            yield from self.write({self.token_cell(self.rank, token): self.token(token) for token in tokens})
        self.release(Signal.inputs_staged)
        if worker == 0:
            yield from self.until(Site.publish, worker, Signal.inputs_staged, 0, self.schedule.workers)
            yield from self.release_to_all(Signal.inputs_ready)
        counts = yield from self.wait_for_counts(worker)
        tasks = self.tasks([sum(rows) for rows in zip(*counts, strict=True)])
        while (number := self.take_number()) < len(tasks):
            task = tasks[number]
            yield from (self.gate_up if task.gemm == Gemm.gate_up else self.down)(worker, task)
        self.release(Signal.tasks_done)
        if worker == 0:
            yield from self.until(Site.announce, worker, Signal.tasks_done, 0, self.schedule.workers)
            yield from self.release_to_all(Signal.partials_written)
        yield from self.combine(worker)

    def taken(self, epoch: int) -> Hashable:
        """The word with the number of the next task; there are two, by parity."""
        return "tasks taken", self.rank, epoch % 2

    def take_number(self) -> int:
        number = self.group.words.values[self.taken(self.epoch)]
        self.group.words.add(self.taken(self.epoch), 1)
        return number

    def tasks(self, rows_per_expert: list[int]) -> list[Any]:
        """The stream, put together once for the rows that all workers read."""
        if self.known_tasks is None or self.known_tasks[0] != rows_per_expert:
            self.known_tasks = rows_per_expert, all_tasks(Problem(self.shape, self.schedule, rows_per_expert))
        return self.known_tasks[1]

    def token(self, token: int) -> tuple[Any, ...]:
        return "token", self.epoch, self.rank, token

    def plan(self, planner: int) -> Agent:
        share = math.ceil(self.shape.slots / self.planners)
        mine = range(self.shape.slots)[planner * share : (planner + 1) * share]
        histogram = Counter(self.experts[slot] for slot in mine)
        yield from self.write({self.histogram_cell(planner): ("histogram", self.epoch, histogram)})
        self.release(Signal.histograms_written)
        yield from self.until(Site.plan, planner, Signal.histograms_written, 0, self.planners)
        histograms = yield from self.read(
            {self.histogram_cell(other): ("histogram", self.epoch) for other in range(self.planners)}
        )
        local = self.shape.local_experts
        values = {}
        for owner in range(self.group.ranks):
            position = 0
            experts = range(owner * local, (owner + 1) * local)
            for expert in experts:
                before = position + sum(other[expert] for other in histograms[:planner])
                for i, slot in enumerate(slot for slot in mine if self.experts[slot] == expert):
                    values[self.slot_cell(owner, self.rank, before + i)] = ("slot", self.epoch, slot)
                position += sum(other[expert] for other in histograms)
            if planner == 0:
                counts = [sum(other[expert] for other in histograms) for expert in experts]
                values[self.counts_cell(owner, self.rank)] = ("counts", self.epoch, counts)
        yield from self.write(values)

    def histogram_cell(self, planner: int) -> Cell:
        return self.rank, self.regions["histograms"] + planner * self.shape.num_experts * 4

    def wait_for_counts(self, agent: int) -> Generator[Until | None, None, list[list[int]]]:
        """Rows from each source for each local expert."""
        for source in range(self.group.ranks):
            yield from self.until(Site.walk, agent, Signal.inputs_ready, source, self.epoch)
        sources = range(self.group.ranks)
        return (
            yield from self.read({self.counts_cell(self.rank, source): ("counts", self.epoch) for source in sources})
        )

    def before(self, site, agent: int, item) -> Iterator[Until]:
        wait = steps.wait_before(self.shape, self.schedule, item)
        if wait:
            yield from self.until(site, agent, wait.signal, wait.index, wait.target)

    def after(self, item) -> None:
        if self.rank > 0 or item != self.group.faults.dropped:
            release = steps.release_after(item)
            self.release(release.signal, release.index, release.amount)

    def gate_up(self, worker: int, task) -> Agent:
        yield from self.before(Site.gate_up, worker, task)
        rows = yield from self.read(
            {self.row_cell(task.ring_slot, row): ("row", self.epoch, task.row_tile, row) for row in range(task.rows)}
        )
        yield from self.write(
            {
                self.hidden_cell(task.ring_slot, column): ("h", self.epoch, task.row_tile, column, rows)
                for column in columns_of(task)
            }
        )
        self.after(task)

    def down(self, worker: int, task) -> Agent:
        yield from self.before(Site.down, worker, task)
        rows, *others, targets = yield from self.read_for_down(task)
        assert all(other == rows for other in others), "all columns of h come from the same rows"
        expert = self.rank * self.shape.local_experts + task.expert
        values = {}
        for row, target in zip(rows, targets, strict=True):
            source, slot = steps.unpack_row_target(target)
            for column in columns_of(task):
                values[self.partial_cell(source, slot, column)] = ("partial", self.epoch, expert, row)
        yield from self.write(values)
        self.after(task)

    def read_for_down(self, task) -> Generator[None, None, list[Any]]:
        tile = (self.epoch, task.row_tile)
        targets = {self.target_cell(task.ring_slot, row): ("target", *tile, row) for row in range(task.rows)}
        h = {self.hidden_cell(task.ring_slot, column): ("h", *tile, column) for column in range(self.hidden_tiles)}
        found = yield from self.read(h | targets)
        return [*found[: self.hidden_tiles], found[self.hidden_tiles :]]

    def combine(self, worker: int) -> Agent:
        for source in range(self.group.ranks):
            yield from self.until(Site.combine, worker, Signal.partials_written, source, self.epoch)
        for token in range(worker, self.shape.tokens, self.schedule.workers):
            slots = range(token * self.shape.top_k, (token + 1) * self.shape.top_k)
            yield from self.read(
                {
                    self.partial_cell(self.rank, slot, column): (
                        ("partial", self.epoch, self.experts[slot], self.token(token))
                    )
                    for slot in slots
                    if self.experts[slot] >= 0
                    for column in range(self.output_tiles)
                }
            )

    # --- a dispatcher

    def dispatcher(self, dispatcher: int) -> Agent:
        counts = yield from self.wait_for_counts(dispatcher)
        rows_per_expert = [sum(rows) for rows in zip(*counts, strict=True)]
        for chunk in steps.chunks(self.shape, self.schedule, rows_per_expert, dispatcher):
            yield from self.before(Site.dispatch, dispatcher, chunk)
            yield from self.pull(counts, chunk)
            self.after(chunk)

    def pull(self, counts: list[list[int]], chunk) -> Agent:
        rows = range(chunk.rows)
        of_expert = [rows_from[chunk.expert] for rows_from in counts]
        sources = [steps.source_of_row(of_expert, chunk.first_row + row, self.rank) for row in rows]
        starts = [sum(rows_from[: chunk.expert]) for rows_from in counts]
        cells = [self.slot_cell(self.rank, at.source, starts[at.source] + at.position) for at in sources]
        slots = yield from self.read(dict.fromkeys(cells, ("slot", self.epoch)))
        tokens = [
            ("token", self.epoch, at.source, slot // self.shape.top_k) for at, slot in zip(sources, slots, strict=True)
        ]
        if self.group.ranks > 1:  # one rank alone reads the caller's tokens
            yield from self.read({self.token_cell(token[2], token[3]): token for token in tokens})
        values = {}
        for row, at, slot, token in zip(rows, sources, slots, tokens, strict=True):
            tags = (self.epoch, chunk.row_tile, chunk.tile_row + row)
            target = steps.pack_row_target(at.source, slot)
            values[self.row_cell(chunk.ring_slot, chunk.tile_row + row)] = ("row", *tags, token)
            values[self.target_cell(chunk.ring_slot, chunk.tile_row + row)] = ("target", *tags, target)
        yield from self.write(values)
