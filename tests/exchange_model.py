"""Dispatch and combine as NumPy loops over ranks and slots: what exchange_suite.py holds every implementation to.

Written from the words that define them, and from no implementation: a counter for each expert goes up.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Routed:
    """Where rows and slots of a group of ranks are; each array has a leading dimension of ranks."""

    row_sources: np.ndarray  # [ranks, rows]
    slot_rows: np.ndarray  # [ranks, tokens, top_k]
    rows_per_expert: np.ndarray  # [ranks, local_experts]
    dropped_rows: np.ndarray
    group_sizes: np.ndarray


def route(
    ids: np.ndarray, num_experts: int, capacity: int | None = None, alignment: int = 1, per_expert: bool = False
) -> Routed:
    """Returns where everything goes, `ids` being `[ranks, tokens, top_k]` with -1 for every unused slot."""
    ranks, tokens, top_k = ids.shape
    local = num_experts // ranks
    counts = [int((ids == expert).sum()) for expert in range(num_experts)]
    if per_expert:
        assert capacity is not None
        rows = local * capacity
        starts = [expert % local * capacity for expert in range(num_experts)]
    else:
        worst = ranks * tokens * top_k + local * (alignment - 1)
        rows = -(-worst // alignment) * alignment if capacity is None else capacity
        starts = []
        for expert in range(num_experts):
            before = range(expert // local * local, expert)
            starts.append(sum(-(-counts[other] // alignment) * alignment for other in before))

    sources = np.full((ranks, rows), -1, np.int32)
    slot_rows = np.full(ids.shape, -1, np.int32)
    found, dropped = np.zeros((2, num_experts), np.int32)
    for rank in range(ranks):
        for slot in range(tokens * top_k):
            expert = ids[rank, slot // top_k, slot % top_k]
            if expert < 0:
                continue
            number = found[expert] + dropped[expert]
            row = starts[expert] + number
            if number >= capacity if per_expert and capacity else row >= rows:
                dropped[expert] += 1
                continue
            found[expert] += 1
            sources[expert // local, row] = rank * 2**24 + slot
            slot_rows[rank, slot // top_k, slot % top_k] = row
    ends = [start + -(-count // alignment) * alignment for start, count in zip(starts, counts, strict=True)]
    sizes = np.minimum(ends, rows) - np.minimum(starts, rows)
    of_ranks = (ranks, local)
    return Routed(sources, slot_rows, found.reshape(of_ranks), dropped.reshape(of_ranks), sizes.reshape(of_ranks))


def with_all_rows_in_groups(routed: Routed) -> Routed:
    """Returns the same where rows of all ranks lie behind each other: none is behind the last expert of a rank."""
    sizes = routed.group_sizes.copy()
    sizes[:, -1] += routed.row_sources.shape[1] - sizes.sum(1)
    return dataclasses.replace(routed, group_sizes=sizes)


def rows_of(routed: Routed, tokens: np.ndarray) -> np.ndarray:
    """Returns the rows `[ranks, rows, width]` of tokens `[ranks, tokens, width]`."""
    top_k = routed.slot_rows.shape[-1]
    rows = np.zeros((*routed.row_sources.shape, tokens.shape[-1]), tokens.dtype)
    for place, source in np.ndenumerate(routed.row_sources):
        if source >= 0:
            rows[place] = tokens[source // 2**24, source % 2**24 // top_k]
    return rows


def sums_of(routed: Routed, ids: np.ndarray, outputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the sums `[ranks, tokens, width]` in float64 of `outputs` `[ranks, rows, width]`."""
    local = routed.rows_per_expert.shape[1]
    sums = np.zeros((*ids.shape[:2], outputs.shape[-1]))
    for (rank, token, k), row in np.ndenumerate(routed.slot_rows):
        if row >= 0:
            answer = outputs[ids[rank, token, k] // local, row]
            sums[rank, token] += np.float64(weights[rank, token, k]) * answer.astype(np.float64)
    return sums


def transposed_sums(
    routed: Routed, ids: np.ndarray, outputs: np.ndarray, weights: np.ndarray, dy: np.ndarray
) -> tuple[Any, Any]:
    """Returns the gradients of `outputs` and of `weights` in float64, given that of the sums."""
    local = routed.rows_per_expert.shape[1]
    doutputs, dweights = np.zeros(outputs.shape), np.zeros(weights.shape)
    for (rank, token, k), row in np.ndenumerate(routed.slot_rows):
        if row >= 0:
            owner = ids[rank, token, k] // local
            gradient = dy[rank, token].astype(np.float64)
            doutputs[owner, row] = np.float64(weights[rank, token, k]) * gradient
            dweights[rank, token, k] = gradient @ outputs[owner, row].astype(np.float64)
    return doutputs, dweights
