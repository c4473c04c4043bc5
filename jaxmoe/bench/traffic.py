"""Bytes that one forward pass moves, term by term, counted from the routing of the inputs that are measured.

Those of a backward pass are in `backward_traffic.py`.

What counts: every step of the layer reads each of its operands once and writes each of its results once, as if caches
lost everything between two steps and kept everything within one. So a term is not what a profiler would show: rows that
are still in L2 when the GEMM reads them cost less, weights that several units of row tiles read at different times cost
more. Rows that only pad a tile, counters and histograms, a few KB, are left out.

`layer.py` divides these by the measured time; nothing here runs on a device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int, Integer

from jaxmoe.plan import Shape

Bytes = int | float
# Of an expert's number, a routing weight and a slot's number: int32 and float32.
WORD = 4


@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts the tokens of every rank chose.

    Args:
      slots: used slots of each rank's tokens that name each expert of the group.
      tokens: of each rank, those that name at least one expert of each owner.
    """

    slots: Int[np.ndarray, "ranks experts"]
    tokens: Int[np.ndarray, "ranks owners"]

    @classmethod
    def of(cls, topk_ids: Integer[np.ndarray, "all_tokens top_k"], ranks: int, num_experts: int) -> "Routing":
        """Counts the slots of tokens that are split evenly over the ranks; ids outside of the experts are not used.

        >>> Routing.of(np.array([[0, 1], [3, -1]]), ranks=2, num_experts=4).slots.tolist()
        [[1, 1, 0, 0], [0, 0, 0, 1]]
        """
        by_rank = topk_ids.reshape(ranks, -1)
        used = [ids[(ids >= 0) & (ids < num_experts)] for ids in by_rank]
        owner = np.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids // (num_experts // ranks), -1)
        tokens = [(owner == rank).any(-1).reshape(ranks, -1).sum(-1) for rank in range(ranks)]
        return cls(np.stack([np.bincount(ids, minlength=num_experts) for ids in used]), np.stack(tokens, -1))

    @property
    def by_owner(self) -> Int[np.ndarray, "ranks owners"]:
        """Used slots of each rank's tokens whose expert is owned by each rank."""
        ranks, num_experts = self.slots.shape
        return self.slots.reshape(ranks, ranks, num_experts // ranks).sum(-1)

    def rows(self, rank: int) -> int:
        """Rows of a rank's experts."""
        return int(self.by_owner[:, rank].sum())

    def remote_rows(self, rank: int) -> int:
        """Those of them whose token another rank owns."""
        return self.rows(rank) - int(self.by_owner[rank, rank])

    def used_slots(self, rank: int) -> int:
        """Used slots of a rank's tokens: the answers that it gets."""
        return int(self.by_owner[rank].sum())

    def remote_slots(self, rank: int) -> int:
        """Those of them whose expert another rank owns."""
        return self.used_slots(rank) - int(self.by_owner[rank, rank])

    def remote_tokens(self, rank: int) -> int:
        """Different tokens of other ranks among the rows of a rank."""
        return int(self.tokens[:, rank].sum() - self.tokens[rank, rank])

    def wanted_tokens(self, rank: int) -> int:
        """Tokens of a rank that other ranks want, once for each of those."""
        return int(self.tokens[rank].sum() - self.tokens[rank, rank])

    def wanted_sums(self, rank: int) -> int:
        """Tokens of a rank, once for each rank that they want, itself among them."""
        return int(self.tokens[rank].sum())

    def active_experts(self, rank: int) -> int:
        """Experts of a rank that have rows."""
        return int((self.rows_of_experts(rank) > 0).sum())

    def rows_of_experts(self, rank: int) -> Int[np.ndarray, "local_experts"]:
        """Rows of each expert of a rank."""
        ranks, num_experts = self.slots.shape
        local = num_experts // ranks
        return self.slots[:, rank * local : (rank + 1) * local].sum(0)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Base of the classes below, whose fields are numbers of bytes."""

    @property
    def total(self) -> float:
        """Sum of all terms, in bytes."""
        return float(sum(self.items().values()))

    def items(self) -> dict[str, Bytes]:
        """The terms by name, in bytes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class MegakernelMemory(Terms):
    """Bytes that `"megakernel"` reads from and writes to the memory of one rank.

    Args:
      weights: `active_experts * expert_bytes`. An expert without rows is not read.
      weights_decoded: where they have fewer bits than they are multiplied in, `2 * active_experts` times the bytes of
        an expert in the dtype of x, or in 8 bits beside such tokens: written by dispatch, read by the GEMMs. Much of it
        stays in L2. 0 where the GEMMs decode them.
      tokens_staged: `tokens * (answer_bytes + token_bytes)`: x read, which is as wide as answers, and its copy written
        where peers reach it. One rank alone makes no copy of tokens that are not rounded: 0.
      tokens_pulled: `used_slots * token_bytes`: this rank's tokens read by dispatch, its own and that of its
        peers, once for each slot. The slots of a token are pulled at different times, those of a small batch from L2.
        Where the plan keeps tokens, by each peer once for all slots of a token.
      tokens_kept: where the plan keeps tokens, `remote_rows * token_bytes`: a peer's token is written for its
        first row and read for each of the others.
      rows_written: `rows * token_bytes`: rows of this rank's experts into the ring, by dispatch.
      rows_read: the same, by the gate and up GEMM.
      h_written: `rows * h_bytes`: h into its ring, by the gate and up GEMM.
      hidden_read: the same, by the down GEMM.
      answers_written: `used_slots * answer_bytes`: answers to this rank's tokens, by the down GEMMs of all ranks. Where
        the plan adds them up at experts, `rows * answer_bytes` of this rank's experts.
      answers_read: the same, by combine.
      sums_written: where the plan adds up at experts, `wanted_sums * answer_bytes`: the sums of all ranks for this
        rank's tokens. Else 0.
      sums_read: the same, by combine.
      y_written: `tokens * answer_bytes`: y.
      routing_read: `4 * 4 * tokens * top_k`: ids by the two passes of the sort and by combine, weights by combine.
      lists_written: `2 * 4 * rows`: slot lists by their sources, targets of rows by dispatch. Where the plan adds up
        answers at experts, their places and weights as well, `2 * 4 * rows`, after all places were cleared,
        `4 * ranks * tokens * top_k`.
      lists_read: as many as `rows` say, by dispatch, the down GEMM and combine.
    """

    weights: Bytes
    weights_decoded: Bytes
    tokens_staged: Bytes
    tokens_pulled: Bytes
    tokens_kept: Bytes
    rows_written: Bytes
    rows_read: Bytes
    h_written: Bytes
    hidden_read: Bytes
    answers_written: Bytes
    answers_read: Bytes
    sums_written: Bytes
    sums_read: Bytes
    y_written: Bytes
    routing_read: Bytes
    lists_written: Bytes
    lists_read: Bytes

    @classmethod
    def of_rank(
        cls,
        routing: Routing,
        shape: Shape,
        rank: int,
        keep_tokens: bool,
        ahead: bool = True,
        sum_at_experts: bool = False,
    ) -> "MegakernelMemory":
        """Counts the terms of one rank; `ahead`: weights that are decoded are so before the GEMMs read them."""
        rows, slots = routing.rows(rank), routing.used_slots(rank)
        answers, sums = (rows, routing.wanted_sums(rank)) if sum_at_experts else (slots, 0)
        noted = (4 if sum_at_experts else 2) * WORD * rows
        to_peers = routing.wanted_tokens(rank) if keep_tokens else routing.remote_slots(rank)
        token, answer, h = shape.token_bytes, shape.answer_bytes, shape.h_bytes
        return cls(
            weights=weight_bytes(routing, shape, rank),
            weights_decoded=2 * weight_bytes(routing, shape.multiplied, rank) if shape.formats.decodes and ahead else 0,
            tokens_staged=shape.tokens * (answer + token) if shape.ranks > 1 or shape.formats.tokens.scale_rows else 0,
            tokens_pulled=(slots - routing.remote_slots(rank) + to_peers) * token,
            tokens_kept=routing.remote_rows(rank) * token if keep_tokens else 0,
            rows_written=rows * token,
            rows_read=rows * token,
            h_written=rows * h,
            hidden_read=rows * h,
            answers_written=answers * answer,
            answers_read=answers * answer,
            sums_written=sums * answer,
            sums_read=sums * answer,
            y_written=shape.tokens * answer,
            routing_read=4 * WORD * shape.tokens * shape.top_k,
            lists_written=noted + (WORD * shape.ranks * shape.tokens * shape.top_k if sum_at_experts else 0),
            lists_read=noted,
        )


@dataclasses.dataclass(frozen=True)
class MegakernelLinks(Terms):
    """Bytes that one rank of `"megakernel"` receives from its peers; it sends as many, but for the lists.

    Args:
      rows_received: `remote_rows * token_bytes`: tokens of other ranks that chose this rank's experts, pulled by
        dispatch, once for each of their slots. Where the plan keeps tokens `remote_tokens * token_bytes`, the
        least: a token that two experts pull at the same time crosses twice.
      answers_received: `remote_slots * answer_bytes`: answers of other ranks' experts to this rank's tokens. Where the
        plan adds them up at experts `wanted_tokens * answer_bytes`: one sum of each rank that a token wants.
      lists_received: `4 * remote_rows`: slot lists. Where the plan adds up at experts, as much of routing weights, and
        `4 * wanted_tokens`, the slots that are in each sum.
    """

    rows_received: Bytes
    answers_received: Bytes
    lists_received: Bytes

    @classmethod
    def of_rank(
        cls, routing: Routing, shape: Shape, rank: int, keep_tokens: bool, sum_at_experts: bool = False
    ) -> "MegakernelLinks":
        """Counts the terms of one rank."""
        token, answer = shape.token_bytes, shape.answer_bytes
        rows = routing.remote_rows(rank)
        answers = routing.wanted_tokens(rank) if sum_at_experts else routing.remote_slots(rank)
        received = routing.remote_tokens(rank) if keep_tokens else rows
        lists = 2 * rows + answers if sum_at_experts else rows
        return cls(rows_received=received * token, answers_received=answers * answer, lists_received=WORD * lists)


@dataclasses.dataclass(frozen=True)
class GatherMemory(Terms):
    """The least that a layer which gathers all tokens reads from and writes to the memory of one rank.

    How often rows, h and answers go through memory is for the compiler to say, which fuses steps as it likes: they are
    not counted.

    Args:
      weights: as of `MegakernelMemory`; grouped GEMMs that skip no expert read more.
      tokens_gathered: `tokens * (answer_bytes + ranks * token_bytes)`: tokens read, which are as wide as answers, those
        of all ranks written. One rank alone gathers nothing: 0.
      sums_sent: `ranks * tokens * answer_bytes`: what its experts answered to every token, read by the collective
        that takes it to the tokens' owners. One rank alone: 0.
      y_written: `tokens * answer_bytes`: y.
    """

    weights: Bytes
    tokens_gathered: Bytes
    sums_sent: Bytes
    y_written: Bytes

    @classmethod
    def of_rank(cls, routing: Routing, shape: Shape, rank: int) -> "GatherMemory":
        """Counts the terms of one rank."""
        tokens, answers = shape.tokens * shape.token_bytes, shape.tokens * shape.answer_bytes
        alone = shape.ranks == 1
        return cls(
            weights=weight_bytes(routing, shape, rank),
            tokens_gathered=0 if alone else answers + shape.ranks * tokens,
            sums_sent=0 if alone else shape.ranks * answers,
            y_written=answers,
        )


@dataclasses.dataclass(frozen=True)
class GatherLinks(Terms):
    """Bytes that one rank of a layer which gathers all tokens receives from its peers, whatever the routing.

    Args:
      tokens_received: `(ranks - 1) * tokens * token_bytes`, by the all-gather.
      sums_received: `(ranks - 1) * tokens * answer_bytes`, by the all-to-all or the reduce-scatter.
      routing_received: `2 * 4 * (ranks - 1) * tokens * top_k`: ids and weights.
    """

    tokens_received: Bytes
    sums_received: Bytes
    routing_received: Bytes

    @classmethod
    def of_rank(cls, routing: Routing, shape: Shape, rank: int) -> "GatherLinks":
        """Counts the terms of one rank; all have the same."""
        del routing, rank
        tokens = (shape.ranks - 1) * shape.tokens
        return cls(
            tokens_received=tokens * shape.token_bytes,
            sums_received=tokens * shape.answer_bytes,
            routing_received=2 * WORD * tokens * shape.top_k,
        )


@dataclasses.dataclass(frozen=True)
class Mean(Terms):
    """Terms of any kind, by name, averaged over several routings."""

    sizes: Mapping[str, Bytes]

    def items(self) -> dict[str, Bytes]:
        """The terms by name, in bytes."""
        return dict(self.sizes)


@dataclasses.dataclass(frozen=True)
class OfRank:
    """The terms of the rank that has most of them."""

    rank: int
    terms: Terms


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one call moves: means over the measured inputs, of the rank that moves most.

    Args:
      memory: through the memory (HBM) of a rank, read and written.
      links: from its peers (NVLink) to a rank; as many bytes leave it, to a few lists.
      complete: whether `memory` has all terms; else it is what moves at least.
    """

    memory: OfRank
    links: OfRank
    complete: bool


def of_megakernel(
    routings: Sequence[Routing], shape: Shape, keep_tokens: bool, ahead: bool = True, sum_at_experts: bool = False
) -> Traffic:
    """Returns what a forward pass of `"megakernel"` moves with a plan.

    Args:
      routings: of the calls.
      shape: of the layer.
      keep_tokens: of the plan.
      ahead: the plan decodes weights ahead, where they are decoded.
      sum_at_experts: of the plan, where there are peers.
    """

    def memory(routing: Routing, rank: int) -> Mapping[str, Bytes]:
        return MegakernelMemory.of_rank(routing, shape, rank, keep_tokens, ahead, sum_at_experts).items()

    def links(routing: Routing, rank: int) -> Mapping[str, Bytes]:
        return MegakernelLinks.of_rank(routing, shape, rank, keep_tokens, sum_at_experts).items()

    return Traffic(busiest(memory, routings), busiest(links, routings), complete=True)


def of_gathering(routings: Sequence[Routing], shape: Shape) -> Traffic:
    """Returns what a forward pass of `"xla"` and the baseline moves for these routings, as far as that can be said."""
    memory, links = (
        busiest(lambda routing, rank, kind=kind: kind.of_rank(routing, shape, rank).items(), routings)
        for kind in (GatherMemory, GatherLinks)
    )
    return Traffic(memory, links, complete=False)


def weight_bytes(routing: Routing, shape: Shape, rank: int) -> int:
    """Returns the bytes of a rank's weights that a forward pass reads: those of its experts that have rows."""
    return routing.active_experts(rank) * shape.expert_bytes


def busiest(count: Callable[[Routing, int], Mapping[str, Bytes]], routings: Sequence[Routing]) -> OfRank:
    """Returns the rank that has most bytes in the mean over the routings.

    Args:
      count: gives the bytes by term of a routing and a rank.
      routings: of as many ranks each.
    """

    def mean(rank: int) -> Terms:
        counts = [count(routing, rank) for routing in routings]
        return Mean({name: sum(each[name] for each in counts) / len(counts) for name in counts[0]})

    ranks = [OfRank(rank, mean(rank)) for rank in range(len(routings[0].slots))]
    return max(ranks, key=lambda of_rank: of_rank.terms.total)
