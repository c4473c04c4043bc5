"""What a rank does in a backward pass (ffi/host/rank.h, products.h)."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.unit.agents_order import Agent
from tests.unit.agents_rank import ITEMSIZE, Cell, Cells, Origin, RankLaunch, need, same
from tests.unit.schedule_model import FIRST_PART, LAST_PART, Gemm, columns_of, steps, weight_tiles

NUMBER_BYTES = 4  # of what is wider than tokens: routing weights and sums


class BackwardLaunch(RankLaunch):
    """What a rank does in a backward pass.

    A row is the token with the gradient of its output, and its routing weight. Numbers between the GEMMs are told apart
    column by column, since gate_up and h_gradient cut the columns differently.
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
        if task.gemm == Gemm.h_gradient:
            return self.h_gradient(task)
        return self.token_gradient(task) if task.gemm == Gemm.token_gradient else self.weight_gradient(task)

    # --- memory

    def weight(self, origin: Origin | None) -> tuple[Any, ...]:
        return "weight", self.launch_number, origin

    def weight_cell(self, rank: int, slot: int) -> Cell:
        return rank, self.regions["routing_weights"] + slot * NUMBER_BYTES

    def answer_cell(self, rank: int, slot: int) -> Cell:
        return rank, self.regions["routing_weight_gradients"] + slot * NUMBER_BYTES

    def row_weight_cell(self, ring_slot: int, tile_row: int) -> Cell:
        row = ring_slot * self.schedule.tile.rows + tile_row
        return self.rank, self.regions["row_routing_weights"] + row * NUMBER_BYTES

    def products_cell(self, ring_slot: int, column_tile: int) -> Cell:
        tiles = steps.gradient_tiles(self.shape, self.schedule)
        number = ring_slot * self.schedule.tile.rows * tiles + column_tile
        return self.rank, self.regions["row_products"] + number * NUMBER_BYTES

    def hidden_cell(self, ring_slot: int, column: int) -> Cell:
        first_row = ring_slot * self.schedule.tile.rows
        return self.rank, self.regions["h"] + (first_row * self.shape.intermediate + column) * ITEMSIZE

    def projection_cell(self, ring_slot: int, which: int, column: int) -> Cell:
        """Of gate (0) or up (1)."""
        first = ring_slot * self.schedule.tile.rows * self.shape.projections + which
        return self.rank, self.regions["projections"] + (first * self.shape.intermediate + column) * ITEMSIZE

    def sums_cell(self, task) -> Cell:
        """The first number of the task's tile, behind those of the matrices before it."""
        hidden, intermediate, tile = self.shape.hidden, self.shape.intermediate, self.schedule.tile
        matrix = {Gemm.gate_gradient: 0, Gemm.up_gradient: 1, Gemm.down_gradient: self.shape.projections}[task.gemm]
        width = hidden if task.gemm == Gemm.down_gradient else intermediate
        number = task.weight_row_tile * tile.rows * width + task.column_tile * tile.columns
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
                self.launch_number,
                row_tile,
                i,
                column,
            )
            for i in which
            for column in columns
        }

    def row_weights_of(self, row_tile: int, rows: int) -> Cells:
        ring_slot = row_tile % self.schedule.ring_tiles
        return {
            self.row_weight_cell(ring_slot, row): ("row weight", self.launch_number, row_tile, row)
            for row in range(rows)
        }

    # --- tasks

    def gate_up(self, task) -> Agent:
        rows = yield from self.read(self.rows_of(task.row_tile, task.rows))
        columns = self.columns_of(task, self.schedule.tile.h_columns)
        cells = self.projections_of("projection", task.row_tile, columns, range(self.shape.projections))
        yield from self.write({cell: (*tags, rows) for cell, tags in cells.items()})

    def h_gradient(self, task) -> Agent:
        tile, both = task.row_tile, range(self.shape.projections)
        columns = self.columns_of(task, self.schedule.tile.columns)
        projections = self.projections_of("projection", tile, columns, both)
        rows = self.rows_of(tile, task.rows)
        found = yield from self.read(projections | rows | self.row_weights_of(tile, task.rows))
        tokens = found[len(projections) :][: task.rows]
        same([*found[: len(projections)], tokens], "gate and up come from the rows that are still there")
        weighted = list(zip(tokens, found[len(projections) + task.rows :], strict=True))
        gradients = self.projections_of("gradient", tile, columns, both)  # in the place of gate and up
        hidden = {self.hidden_cell(task.ring_slot, c): ("weighted h", self.launch_number, tile, c) for c in columns}
        products = {
            self.products_cell(task.ring_slot, c): ("products", self.launch_number, tile, c) for c in columns_of(task)
        }
        yield from self.write({cell: (*tags, weighted) for cell, tags in (gradients | hidden | products).items()})

    def token_gradient(self, task) -> Agent:
        tile, everything = task.row_tile, range(self.shape.intermediate)
        wanted = self.projections_of("gradient", tile, everything, range(self.shape.projections))
        if task.column_tile == 0:
            tiles = range(steps.gradient_tiles(self.shape, self.schedule))
            wanted |= {self.products_cell(task.ring_slot, i): ("products", self.launch_number, tile, i) for i in tiles}
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
                values[self.partial_cell(source, slot, column)] = (
                    "partial",
                    self.launch_number,
                    self.expert_of(task),
                    row,
                )
            if task.column_tile == 0:
                values[self.answer_cell(source, slot)] = ("answer", self.launch_number, self.expert_of(task), row)
        yield from self.write(values)

    def weight_gradient(self, task) -> Agent:
        rows, wanted = self.factors_of(task)
        before = {}  # what segments before this one have summed
        if not task.part & FIRST_PART:
            before = {self.sums_cell(task): ("sums", self.launch_number, task.expert, task.row_tile)}
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
            yield from self.write({self.sums_cell(task): ("sums", self.launch_number, task.expert, end, summed)})
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
                factor = {self.hidden_cell(slot, c): ("weighted h", self.launch_number, row_tile, c) for c in columns}
            else:
                columns = self.columns_of(task, tile.columns)
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
            tags = self.launch_number, self.experts[slot], (self.token(token), (self.rank, slot))
            wanted = {self.partial_cell(self.rank, slot, c): ("partial", *tags) for c in range(self.answer_tiles)}
            yield from self.read(wanted | {self.answer_cell(self.rank, slot): ("answer", *tags)})

    def notes_of(self, chunk, slots: list[Origin | None]) -> tuple[Cells, Cells]:
        read = {self.weight_cell(*origin): self.weight(origin) for origin in slots if origin}
        noted = {
            self.row_weight_cell(chunk.ring_slot, chunk.tile_row + i): (
                ("row weight", self.launch_number, chunk.row_tile, chunk.tile_row + i, origin)
            )
            for i, origin in enumerate(slots)
        }
        return read, noted
