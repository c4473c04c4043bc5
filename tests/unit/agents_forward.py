"""What a rank does in a forward pass (ffi/host/rank.h, products.h, sums_at_experts.h)."""

import itertools
from typing import Any

from tests.unit.agents_order import Agent
from tests.unit.agents_rank import ITEMSIZE, Cell, Cells, Origin, RankLaunch, need, same
from tests.unit.schedule_model import Gemm, columns_of, steps


class ForwardLaunch(RankLaunch):
    """What a rank does in a forward pass."""

    def stage(self, worker: int) -> Agent:
        if self.group.ranks > 1:
            yield from self.write_tokens(worker)
        if self.schedule.summed_tiles:
            own = range(self.shape.slots)[worker :: self.schedule.workers]
            all_slots = itertools.product(range(self.group.ranks), own)
            places = {self.place_cell(*origin): ("place", self.launch_number, None) for origin in all_slots}
            yield from self.write(places | {self.weight_cell(self.rank, slot): self.weight(slot) for slot in own})

    def compute(self, worker: int, task) -> Agent:
        return self.gate_up(task) if task.gemm == Gemm.gate_up else self.down(task)

    def hidden_cell(self, ring_slot: int, column_tile: int) -> Cell:
        first_row = ring_slot * self.schedule.tile.rows
        column = column_tile * self.schedule.tile.h_columns
        return self.rank, self.regions["h"] + (first_row * self.shape.intermediate + column) * ITEMSIZE

    def gate_up(self, task) -> Agent:
        rows = yield from self.read(self.rows_of(task.row_tile, task.rows))
        yield from self.write(
            {
                self.hidden_cell(task.ring_slot, column): ("h", self.launch_number, task.row_tile, column, rows)
                for column in columns_of(task)
            }
        )

    def down(self, task) -> Agent:
        columns = range(steps.h_tiles(self.shape, self.schedule))
        h = {
            self.hidden_cell(task.ring_slot, column): ("h", self.launch_number, task.row_tile, column)
            for column in columns
        }
        found = yield from self.read(h | self.targets_of(task.row_tile, task.rows))
        rows = same(found[: len(columns)], "all columns of h come from the same rows")
        values = {}
        for row, target in zip(rows, found[len(columns) :], strict=True):
            source, slot = steps.unpack_row_target(target)
            for column in columns_of(task):
                values[self.partial_cell(source, slot, column)] = (
                    "partial",
                    self.launch_number,
                    self.expert_of(task),
                    row,
                )
        yield from self.write(values)

    def combine(self, worker: int) -> Agent:
        summed = (yield from self.read_sums(worker)) if self.schedule.summed_tiles else set()
        for token, slot in self.my_slots(worker):
            if slot not in summed:
                answer = self.answer_to((self.rank, slot), self.token(token))
                yield from self.read(self.answer_cells(slot, answer))

    def answer_to(self, origin: Origin, token: tuple[Any, ...]) -> tuple[Any, ...]:
        source, slot = origin
        return "partial", self.launch_number, self.group.launches[self.number].experts[source][slot], token

    def answer_cells(self, row: int, answer: tuple[Any, ...]) -> Cells:
        """A row of the answers of this rank."""
        return {self.partial_cell(self.rank, row, column): answer for column in range(self.answer_tiles)}

    # --- sums at experts

    def place_cell(self, source: int, slot: int) -> Cell:
        return self.rank, self.regions["answer_places"] + (source * self.shape.slots + slot) * 4

    def noted_weight_cell(self, source: int, slot: int) -> Cell:
        return self.rank, self.regions["answer_weights"] + (source * self.shape.slots + slot) * 4

    def weight_cell(self, rank: int, slot: int) -> Cell:
        return rank, self.regions["routing_weights"] + slot * 4

    def weight(self, slot: int) -> tuple[Any, ...]:
        return "weight", self.launch_number, self.rank, slot

    def summed_cell(self, rank: int, source: int, token: int) -> Cell:
        return rank, self.regions["summed_slots"] + (source * self.shape.tokens + token) * 4

    def sum_cells(self, rank: int, source: int, token: int, value: tuple[Any, ...]) -> Cells:
        """The row of the answers of `rank` where `source` puts its sum for a token."""
        row = steps.sum_row(self.shape, self.schedule, source, token)
        return {self.partial_cell(rank, row, column): value for column in range(self.answer_tiles)}

    def target_of(self, chunk, tile_row: int, origin: Origin) -> Origin:
        if chunk.row_tile >= self.schedule.summed_tiles:
            return origin
        return self.rank, steps.waiting_answer(self.shape, self.schedule, chunk.row_tile, tile_row)

    def notes_of(self, chunk, slots: list[Origin | None]) -> tuple[Cells, Cells]:
        read: Cells = {}
        noted: Cells = {}
        for i, origin in enumerate(slots if self.schedule.summed_tiles else ()):
            assert origin is not None
            source, slot = origin
            weight = "weight", self.launch_number, source, slot
            rank, row = self.target_of(chunk, chunk.tile_row + i, origin)
            waits = chunk.row_tile < self.schedule.summed_tiles
            need(not waits or rank == self.rank, "answers that wait do so at their expert")
            read[self.weight_cell(source, slot)] = weight
            noted[self.noted_weight_cell(source, slot)] = weight
            noted[self.place_cell(source, slot)] = "place", self.launch_number, row if waits else "travels"
        return read, noted

    def add_up_for_peers(self, worker: int) -> Agent:
        tokens = itertools.product(range(self.group.ranks), range(self.shape.tokens))
        for source, token in itertools.islice(tokens, worker, None, self.schedule.workers):
            slots = range(token * self.shape.top_k, (token + 1) * self.shape.top_k)
            wanted = {self.place_cell(source, slot): ("place", self.launch_number) for slot in slots}
            places = dict(zip(slots, (yield from self.read(wanted)), strict=True))
            if all(place is None for place in places.values()):
                continue
            waiting = {slot: place for slot, place in places.items() if isinstance(place, int)}
            cells: Cells = {}
            for slot, row in waiting.items():
                cells |= self.answer_cells(
                    row, self.answer_to((source, slot), ("token", self.launch_number, source, token))
                )
                cells[self.noted_weight_cell(source, slot)] = "weight", self.launch_number, source, slot
            yield from self.read(cells)
            summed = tuple(waiting)
            values = {self.summed_cell(source, self.rank, token): ("summed", self.launch_number, summed)}
            if summed:
                values |= self.sum_cells(source, self.rank, token, ("sum", self.launch_number, self.rank, summed))
            yield from self.write(values)

    def read_sums(self, worker: int) -> Any:
        """The slots of a worker's tokens that are in sums; returns them."""
        in_sums: set[int] = set()
        local = self.shape.local_experts
        owners = {(token, self.experts[slot] // local) for token, slot in self.my_slots(worker)}
        for token, owner in sorted(owners):
            cell = self.summed_cell(self.rank, owner, token)
            (summed,) = yield from self.read({cell: ("summed", self.launch_number)})
            if summed:
                value = "sum", self.launch_number, owner, summed
                yield from self.read(self.sum_cells(self.rank, owner, token, value))
            in_sums |= {*summed}
        return in_sums
