"""What a rank does in a forward pass (ffi/host/rank.h, products.h)."""

from tests.unit.agents_order import Agent
from tests.unit.agents_rank import ITEMSIZE, Cell, RankLaunch, same
from tests.unit.schedule_model import Gemm, columns_of, steps


class ForwardLaunch(RankLaunch):
    """What a rank does in a forward pass."""

    def stage(self, worker: int) -> Agent:
        if self.group.ranks > 1:
            yield from self.write_tokens(worker)

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
        for token, slot in self.my_slots(worker):
            answer = "partial", self.launch_number, self.experts[slot], self.token(token)
            columns = range(self.answer_tiles)
            yield from self.read({self.partial_cell(self.rank, slot, column): answer for column in columns})
