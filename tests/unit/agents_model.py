"""A model of ranks that run launches of the kernel, with one Python generator for each worker and dispatcher.

Order, waits, releases and offsets all come from the compiled code (`native.schedule()`), so a test that runs the model
tests that code. What the model adds is time: `run` resumes one agent at a time in an order that a test draws, and every
write lasts from one resumption to a later one. What is read carries the launch and the place it was written for; a
reader looks before and after a pause, so memory that is reused too early is found (`StaleRead`). Agents that wait for
each other in a circle are found too (`Stuck`).

The agents follow ffi/host/rank.h, forward_rank.h and backward_rank.h role by role.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import hypothesis.strategies as st

from tests.unit.schedule_model import (
    FIRST_PART,
    LAST_PART,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    Signal,
    Site,
    all_tasks,
    columns_of,
    filled_up,
    steps,
    waits_of,
    weight_tiles,
    with_fields,
)

ITEMSIZE = 2
NUMBER_BYTES = 4  # of what is wider than tokens: routing weights and sums


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
    crews: Sequence[tuple[int, int]] = ()  # workers and dispatchers of each rank, where they differ

    def schedule_of(self, rank: int) -> Any:
        if not self.crews:
            return self.schedule
        workers, dispatchers = self.crews[rank]
        return with_fields(self.schedule, workers=workers, dispatchers=dispatchers)


class Faults(NamedTuple):
    """What is planted. Waits that return at once are named by their site, by site and signal, or by the word as well:
    "dispatch", "dispatch outputs_written", "dispatch outputs_written[3]". Banks are those that do not change by parity.
    """

    skipped_waits: frozenset[str] = frozenset()
    one_bank: frozenset[str] = frozenset()
    dropped: Any = None  # a Task or Chunk of rank 0 that is not followed by its release


NO_FAULTS = Faults()
TORN = ("torn",)
Cell = tuple[int, int]  # rank, byte offset in its arena
Cells = dict[Cell, tuple[Any, ...]]
Origin = tuple[int, int]  # rank and slot that a row comes from


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
        first = launch_of(self, 0, 0)
        for rank in range(self.ranks):
            for source in range(self.ranks):
                for signal in (Signal.inputs_ready, Signal.partials_written):
                    self.words.put(first.word(rank, signal, source), before)

    def agents(self) -> dict[str, Agent]:
        return {
            f"rank {rank} launch {number} {name}": agent
            for rank in range(self.ranks)
            for number in range(len(self.launches))
            for name, agent in launch_of(self, rank, number).agents().items()
        }

    def run(self, order: Order) -> None:
        run(self.agents(), self.words, order)


class Known(NamedTuple):
    """What the walks make of the rows of each expert."""

    rows_per_expert: list[int]
    tasks: list[Any]
    waits_before: Callable[[Any], list[Any]]


@dataclass
class RankLaunch:
    """One launch on one rank: what forward and backward passes share."""

    group: Group
    rank: int
    number: int

    def __post_init__(self):
        launch = self.group.launches[self.number]
        self.epoch, self.shape, self.schedule = launch.epoch, launch.shape, launch.schedule_of(self.rank)
        self.experts = launch.experts[self.rank]
        self.head = self.group.head
        self.layout = steps.layout_of(self.shape, self.schedule, self.head, ITEMSIZE)
        self.regions = {name: offset for name, (offset, _) in (self.layout.head | self.layout.body).items()}
        self.planners = steps.num_planners(self.shape, self.schedule)
        self.output_tiles = steps.output_tiles(self.shape, self.schedule)
        self.known: Known | None = None

    # What a pass does its own way.

    def stage(self, worker: int) -> Agent:
        raise NotImplementedError

    def compute(self, worker: int, task) -> Agent:
        raise NotImplementedError

    def check_results(self) -> None:
        """Called when all tasks of the rank are done."""

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
        names = {site.name, f"{site.name} {signal.name}", f"{site.name} {signal.name}[{index}]"}
        if names.isdisjoint(self.group.faults.skipped_waits):
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
        yield from self.stage(worker)
        self.release(Signal.inputs_staged)
        if worker == 0:
            yield from self.until(Site.publish, worker, Signal.inputs_staged, 0, self.schedule.workers)
            yield from self.release_to_all(Signal.inputs_ready)
        counts = yield from self.wait_for_counts(worker)
        known = self.walks(counts)
        while (number := self.take_number()) < len(known.tasks):
            task = known.tasks[number]
            yield from self.before(self.site_of(task.gemm), worker, known.waits_before(task))
            yield from self.compute(worker, task)
            self.after(task)
        self.release(Signal.tasks_done)
        if worker == 0:
            yield from self.until(Site.announce, worker, Signal.tasks_done, 0, self.schedule.workers)
            self.check_results()
            yield from self.release_to_all(Signal.partials_written)
        for source in range(self.group.ranks):
            yield from self.until(Site.combine, worker, Signal.partials_written, source, self.epoch)
        yield from self.combine(worker)

    @staticmethod
    def site_of(gemm) -> Any:
        return Site.weight_gradient if gemm in WEIGHT_GRADIENTS else Site.__members__[gemm.name]

    def taken(self, epoch: int) -> Hashable:
        """The word with the number of the next task; there are two, by parity."""
        return "tasks taken", self.rank, epoch % 2

    def take_number(self) -> int:
        number = self.group.words.values[self.taken(self.epoch)]
        self.group.words.add(self.taken(self.epoch), 1)
        return number

    def walks(self, counts: list[list[int]]) -> Known:
        """The stream, put together once for the counts that all workers and dispatchers read."""
        rows = filled_up(self.schedule, [sum(of_source) for of_source in zip(*counts, strict=True)])
        if self.known is None or self.known.rows_per_expert != rows:
            problem = Problem(self.shape, self.schedule, rows)
            self.known = Known(rows, all_tasks(problem), waits_of(problem))
        return self.known

    def token(self, token: int) -> tuple[Any, ...]:
        return "token", self.epoch, self.rank, token

    def write_tokens(self, worker: int) -> Agent:
        tokens = range(worker, self.shape.tokens, self.schedule.workers)
        yield from self.write({self.token_cell(self.rank, token): self.token(token) for token in tokens})

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
        return {self.row_cell(ring_slot, row): ("row", self.epoch, row_tile, row) for row in range(rows)}

    def targets_of(self, row_tile: int, rows: int) -> dict[Cell, tuple[Any, ...]]:
        ring_slot = row_tile % self.schedule.ring_tiles
        return {self.target_cell(ring_slot, row): ("target", self.epoch, row_tile, row) for row in range(rows)}

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
            tags = (self.epoch, chunk.row_tile, row)
            target = None if origin is None else steps.pack_row_target(*origin)
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
        return origin and ("token", self.epoch, origin[0], origin[1] // self.shape.top_k)

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
        slots = iter((yield from self.read(dict.fromkeys(cells, ("slot", self.epoch)))))
        return [place and (place[0], next(slots)) for place in places]


class ForwardLaunch(RankLaunch):
    """What a rank does in a forward pass."""

    def stage(self, worker: int) -> Agent:
        if self.group.ranks > 1:
            yield from self.write_tokens(worker)

    def compute(self, worker: int, task) -> Agent:
        return self.gate_up(task) if task.gemm == Gemm.gate_up else self.down(task)

    def hidden_cell(self, ring_slot: int, column_tile: int) -> Cell:
        first_row = ring_slot * self.schedule.tile.rows
        column = column_tile * self.schedule.tile.hidden_columns
        return self.rank, self.regions["hidden"] + (first_row * self.shape.intermediate + column) * ITEMSIZE

    def gate_up(self, task) -> Agent:
        rows = yield from self.read(self.rows_of(task.row_tile, task.rows))
        yield from self.write(
            {
                self.hidden_cell(task.ring_slot, column): ("h", self.epoch, task.row_tile, column, rows)
                for column in columns_of(task)
            }
        )

    def down(self, task) -> Agent:
        columns = range(steps.hidden_tiles(self.shape, self.schedule))
        h = {self.hidden_cell(task.ring_slot, column): ("h", self.epoch, task.row_tile, column) for column in columns}
        found = yield from self.read(h | self.targets_of(task.row_tile, task.rows))
        rows = same(found[: len(columns)], "all columns of h come from the same rows")
        values = {}
        for row, target in zip(rows, found[len(columns) :], strict=True):
            source, slot = steps.unpack_row_target(target)
            for column in columns_of(task):
                values[self.partial_cell(source, slot, column)] = ("partial", self.epoch, self.expert_of(task), row)
        yield from self.write(values)

    def combine(self, worker: int) -> Agent:
        for token, slot in self.my_slots(worker):
            answer = "partial", self.epoch, self.experts[slot], self.token(token)
            columns = range(self.output_tiles)
            yield from self.read({self.partial_cell(self.rank, slot, column): answer for column in columns})


class BackwardLaunch(RankLaunch):
    """What a rank does in a backward pass.

    A row is the token with the gradient of its output, and its routing weight. Numbers between the GEMMs are told apart
    column by column, since gate_up and hidden_gradient cut the columns differently.
    """

    def __post_init__(self):
        super().__post_init__()
        self.gradients: dict[tuple[Any, ...], list[Any]] = {}  # tile of a weight gradient -> rows in its sum

    def stage(self, worker: int) -> Agent:
        yield from self.write_tokens(worker)
        slots = range(worker, self.shape.slots, self.schedule.workers)
        yield from self.write({self.weight_cell(self.rank, slot): self.weight((self.rank, slot)) for slot in slots})

    def compute(self, worker: int, task) -> Agent:
        if task.gemm == Gemm.gate_up:
            return self.gate_up(task)
        if task.gemm == Gemm.hidden_gradient:
            return self.hidden_gradient(task)
        return self.token_gradient(task) if task.gemm == Gemm.token_gradient else self.weight_gradient(task)

    # --- memory

    def weight(self, origin: Origin | None) -> tuple[Any, ...]:
        return "weight", self.epoch, origin

    def weight_cell(self, rank: int, slot: int) -> Cell:
        return rank, self.regions["weights"] + slot * NUMBER_BYTES

    def answer_cell(self, rank: int, slot: int) -> Cell:
        return rank, self.regions["weight_answers"] + slot * NUMBER_BYTES

    def row_weight_cell(self, ring_slot: int, tile_row: int) -> Cell:
        row = ring_slot * self.schedule.tile.rows + tile_row
        return self.rank, self.regions["row_weights"] + row * NUMBER_BYTES

    def products_cell(self, ring_slot: int, column_tile: int) -> Cell:
        tiles = steps.gradient_tiles(self.shape, self.schedule)
        number = ring_slot * self.schedule.tile.rows * tiles + column_tile
        return self.rank, self.regions["row_products"] + number * NUMBER_BYTES

    def hidden_cell(self, ring_slot: int, column: int) -> Cell:
        first_row = ring_slot * self.schedule.tile.rows
        return self.rank, self.regions["hidden"] + (first_row * self.shape.intermediate + column) * ITEMSIZE

    def projection_cell(self, ring_slot: int, which: int, column: int) -> Cell:
        """Of gate (0) or up (1)."""
        first = ring_slot * self.schedule.tile.rows * self.shape.projections + which
        return self.rank, self.regions["projections"] + (first * self.shape.intermediate + column) * ITEMSIZE

    def sums_cell(self, task) -> Cell:
        """The first number of the task's tile, behind those of the matrices before it."""
        hidden, intermediate, tile = self.shape.hidden, self.shape.intermediate, self.schedule.tile
        matrix = {Gemm.gate_gradient: 0, Gemm.up_gradient: 1, Gemm.down_gradient: self.shape.projections}[task.gemm]
        width = hidden if task.gemm == Gemm.down_gradient else intermediate
        number = task.weight_row_tile * tile.rows * width + task.column_tile * tile.output_columns
        return self.rank, self.regions["weight_sums"] + (matrix * hidden * intermediate + number) * NUMBER_BYTES

    def columns_of(self, task, tile_columns: int) -> range:
        """Columns between the GEMMs."""
        first = task.column_tile * tile_columns
        return range(self.shape.intermediate)[first : first + task.column_tiles * tile_columns]

    def projections_of(self, what: str, row_tile: int, columns: Iterable[int], which: Iterable[int]) -> Cells:
        """Cells of gate and up, or of their gradients, of a row tile, with what they have to begin with."""
        return {
            self.projection_cell(row_tile % self.schedule.ring_tiles, i, column): (
                what,
                self.epoch,
                row_tile,
                i,
                column,
            )
            for i in which
            for column in columns
        }

    def row_weights_of(self, row_tile: int, rows: int) -> Cells:
        ring_slot = row_tile % self.schedule.ring_tiles
        return {self.row_weight_cell(ring_slot, row): ("row weight", self.epoch, row_tile, row) for row in range(rows)}

    # --- tasks

    def gate_up(self, task) -> Agent:
        rows = yield from self.read(self.rows_of(task.row_tile, task.rows))
        columns = self.columns_of(task, self.schedule.tile.hidden_columns)
        cells = self.projections_of("projection", task.row_tile, columns, range(self.shape.projections))
        yield from self.write({cell: (*tags, rows) for cell, tags in cells.items()})

    def hidden_gradient(self, task) -> Agent:
        tile, both = task.row_tile, range(self.shape.projections)
        columns = self.columns_of(task, self.schedule.tile.output_columns)
        projections = self.projections_of("projection", tile, columns, both)
        rows = self.rows_of(tile, task.rows)
        found = yield from self.read(projections | rows | self.row_weights_of(tile, task.rows))
        tokens = found[len(projections) :][: task.rows]
        same([*found[: len(projections)], tokens], "gate and up come from the rows that are still there")
        weighted = list(zip(tokens, found[len(projections) + task.rows :], strict=True))
        gradients = self.projections_of("gradient", tile, columns, both)  # in the place of gate and up
        hidden = {self.hidden_cell(task.ring_slot, c): ("weighted h", self.epoch, tile, c) for c in columns}
        products = {self.products_cell(task.ring_slot, c): ("products", self.epoch, tile, c) for c in columns_of(task)}
        yield from self.write({cell: (*tags, weighted) for cell, tags in (gradients | hidden | products).items()})

    def token_gradient(self, task) -> Agent:
        tile, everything = task.row_tile, range(self.shape.intermediate)
        wanted = self.projections_of("gradient", tile, everything, range(self.shape.projections))
        if task.column_tile == 0:
            tiles = range(steps.gradient_tiles(self.shape, self.schedule))
            wanted |= {self.products_cell(task.ring_slot, i): ("products", self.epoch, tile, i) for i in tiles}
        found = yield from self.read(wanted | self.targets_of(tile, task.rows) | self.rows_of(tile, task.rows))
        weighted = same(found[: len(wanted)], "all gradients and products come from the same rows")
        targets, tokens = found[len(wanted) :][: task.rows], found[len(wanted) + task.rows :]
        need(tokens == [token for token, _ in weighted], "the gradients of outputs are still there")
        values = {}
        for row, target in zip(weighted, targets, strict=True):
            if target is None:
                need(row == (None, None), "only rows of zeros go nowhere")
                continue
            source, slot = steps.unpack_row_target(target)
            for column in columns_of(task):
                values[self.partial_cell(source, slot, column)] = ("partial", self.epoch, self.expert_of(task), row)
            if task.column_tile == 0:
                values[self.answer_cell(source, slot)] = ("answer", self.epoch, self.expert_of(task), row)
        yield from self.write(values)

    def weight_gradient(self, task) -> Agent:
        rows, wanted = self.factors_of(task)
        before = {}  # what segments before this one have summed
        if not task.part & FIRST_PART:
            before = {self.sums_cell(task): ("sums", self.epoch, task.expert, task.row_tile)}
        found = yield from self.read(before | wanted)
        summed = found[0] if before else []
        for tile_rows, parts in rows:
            of_tile = found[len(before) :][parts]
            tokens, weights, gradients = (
                of_tile[:tile_rows],
                of_tile[tile_rows : 2 * tile_rows],
                of_tile[2 * tile_rows :],
            )
            weighted = list(zip(tokens, weights, strict=True))
            same([*gradients, weighted], "both factors come from the same rows")
            summed = summed + weighted
        place = task.gemm, task.expert, task.weight_row_tile, task.column_tile
        end = task.row_tile + len(rows)
        if not task.part & LAST_PART:
            yield from self.write({self.sums_cell(task): ("sums", self.epoch, task.expert, end, summed)})
            return
        assert place not in self.gradients, f"{place} is written twice"
        self.gradients[place] = summed

    def factors_of(self, task) -> tuple[list[tuple[int, slice]], Cells]:
        """What is read for a weight gradient: of each tile of the segment tokens and weights, then its h or gradients.

        In front of it, the number of rows of each tile and where what is read of it stands.
        """
        tile = self.schedule.tile
        where, wanted = [], {}
        for number in range(math.ceil(task.rows / tile.rows)):
            row_tile, rows = task.row_tile + number, min(tile.rows, task.rows - number * tile.rows)
            if task.gemm == Gemm.down_gradient:
                first = task.weight_row_tile * tile.rows
                columns = range(self.shape.intermediate)[first : first + tile.rows]
                slot = row_tile % self.schedule.ring_tiles
                factor = {self.hidden_cell(slot, c): ("weighted h", self.epoch, row_tile, c) for c in columns}
            else:
                columns = self.columns_of(task, tile.output_columns)
                which = [0 if task.gemm == Gemm.gate_gradient else 1]
                factor = self.projections_of("gradient", row_tile, columns, which)
            begin = len(wanted)
            wanted |= self.rows_of(row_tile, rows) | self.row_weights_of(row_tile, rows) | factor
            where.append((rows, slice(begin, len(wanted))))
        return where, wanted

    def check_results(self) -> None:
        """Every tile of every weight gradient is there and has every row of its expert in it, once and in order."""
        if self.known is None:
            return
        rows_of_experts = Counter()
        for place, summed in self.gradients.items():
            origins = [origin for _, origin in summed if origin]
            assert len(set(origins)) == len(origins), f"{place} has a row twice"
            rows_of_experts[place[:2]] += len(summed)
        tiles = weight_tiles(self.shape, self.schedule)
        expected = {
            (gemm, expert): rows * tiles[gemm]
            for expert, rows in enumerate(self.known.rows_per_expert)
            for gemm in tiles
            if rows
        }
        assert rows_of_experts == expected

    # --- what goes back, and what comes with a row

    def combine(self, worker: int) -> Agent:
        for token, slot in self.my_slots(worker):
            tags = self.epoch, self.experts[slot], (self.token(token), (self.rank, slot))
            wanted = {self.partial_cell(self.rank, slot, c): ("partial", *tags) for c in range(self.output_tiles)}
            yield from self.read(wanted | {self.answer_cell(self.rank, slot): ("answer", *tags)})

    def notes_of(self, chunk, slots: list[Origin | None]) -> tuple[Cells, Cells]:
        read = {self.weight_cell(*origin): self.weight(origin) for origin in slots if origin}
        noted = {
            self.row_weight_cell(chunk.ring_slot, chunk.tile_row + i): (
                ("row weight", self.epoch, chunk.row_tile, chunk.tile_row + i, origin)
            )
            for i, origin in enumerate(slots)
        }
        return read, noted


def need(holds: bool, what: str) -> None:
    if not holds:
        raise StaleRead(what)


def same(values: list[Any], what: str) -> Any:
    """The one value that all are."""
    need(all(other == values[0] for other in values), what)
    return values[0]


def launch_of(group: Group, rank: int, number: int) -> RankLaunch:
    kind = BackwardLaunch if group.launches[number].schedule.backward else ForwardLaunch
    return kind(group, rank, number)
