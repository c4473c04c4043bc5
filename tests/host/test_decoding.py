"""Weights that are decoded ahead of the tasks that multiply them, on the host executor: signals, and the ring of slots.

That the numbers are right through `moe_layer` is in tests/fp8_suite.py.
"""

import functools
from typing import Any

import numpy as np
import pytest

import jaxmoe
from jaxmoe import native
from jaxmoe.testing import make_inputs, relative_error

schedule, executor = native.schedule(), native.executor()
RANKS, LAUNCHES = 2, 3
SHAPE = schedule.Shape(RANKS, 12, 48, 80, 12, 3)
TILE = schedule.TileSizes(4, 16, 24)


def plan_of(*numbers: int, slots: int, segment_tiles: int = 0) -> Any:
    return schedule.Schedule(
        TILE, *numbers, narrow_rows=2, keep_tokens=1, segment_tiles=segment_tiles, weight_slots=slots
    )


# Unit tiles, lag, ring tiles, workers, rows of a chunk, dispatchers.
FORWARD = {
    "one slot": plan_of(1, 0, 2, 2, 3, 2, slots=1),
    "two slots": plan_of(2, 1, 6, 2, 2, 4, slots=2),
    "more dispatchers than rows of a matrix": plan_of(1, 1, 4, 3, 4, 300, slots=3),
    "a slot for each expert": plan_of(3, 2, 12, 3, 4, 3, slots=6),
}
BACKWARD = {
    "three slots": plan_of(1, 1, 4, 2, 3, 2, slots=3, segment_tiles=1),
    "a slot for each expert": plan_of(2, 2, 12, 3, 4, 6, slots=6, segment_tiles=2),
}
PLANS = [*FORWARD.values(), *BACKWARD.values()]


@functools.cache
def layers() -> tuple[tuple[np.ndarray, ...], np.ndarray, jaxmoe.Experts]:
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, SHAPE.num_experts, (LAUNCHES, RANKS, SHAPE.tokens, SHAPE.top_k)).astype(np.int32)
    ids[1] = np.where(ids[1] >= 0, ids[1] // 4 * 4, -1)  # most experts have no rows
    x, dy = (rng.standard_normal((LAUNCHES, RANKS, SHAPE.tokens, SHAPE.hidden)).astype(np.float32) for _ in range(2))
    weights = rng.uniform(-1, 1, ids.shape).astype(np.float32)
    sizes = {"tokens": 8, "hidden": SHAPE.hidden, "intermediate": SHAPE.intermediate, "num_experts": SHAPE.num_experts}
    return (x, ids, weights), dy, jaxmoe.quantize(make_inputs(3, **sizes, top_k=3).experts, "channel")


def launched(plan: Any, **options: Any) -> dict[str, np.ndarray]:
    arrays, dy, experts = layers()
    matrices: Any = (experts.w_gate, experts.w_up, experts.w_down)
    values = [np.asarray(matrix.values).view(np.uint8) for matrix in matrices]
    scales = [np.asarray(matrix.scales) for matrix in matrices]
    options |= {"dy": dy} if plan.backward else {}
    weights = schedule.Format("float8_e4m3fn", 1, 2**31 - 1)
    return executor.run_passes(SHAPE, [plan], *arrays, *values, weights=weights, scales=scales, **options)


@functools.cache
def with_wide_weights(backward: bool) -> dict[str, np.ndarray]:
    """The same layers with experts that were decoded before, on the plan that decodes nothing."""
    arrays, dy, experts = layers()
    wide = jaxmoe.dequantize(experts, np.float32)
    matrices = [np.asarray(matrix) for matrix in (wide.w_gate, wide.w_up, wide.w_down)]
    plan = plan_of(1, 1, 99, 2, 3, 2, slots=0, segment_tiles=4 if backward else 0)
    return executor.run_passes(SHAPE, [plan], *arrays, *matrices, **({"dy": dy} if backward else {}))


@pytest.mark.parametrize("plan", PLANS, ids=[*FORWARD, *(f"backward, {name}" for name in BACKWARD)])
def test_every_ring_of_slots_gives_the_results_of_wide_weights(plan):
    found, wanted = launched(plan), with_wide_weights(plan.backward)
    assert set(found) == ({"dx", "dtopk_weights"} if plan.backward else {"y"})
    for name, result in found.items():
        assert relative_error(result, wanted[name]) < 1e-6


@pytest.mark.parametrize("seed", range(3 * len(PLANS)))
def test_delays_at_every_signal_change_no_bit(seed):
    plan = PLANS[seed % len(PLANS)]
    delays = executor.Disturbance(delay_seed=seed, most_delay_us=[20, 200][seed % 2])
    found, wanted = launched(plan, disturbance=delays), launched(plan)
    for name, result in found.items():
        np.testing.assert_array_equal(result, wanted[name])


@pytest.mark.parametrize("site", ["decode", "gate_up"])
def test_a_wait_that_a_rank_leaves_out_spoils_the_output(site):
    """Of a task for its weights (beside that for its rows), or of a dispatcher for their slot."""
    plan = FORWARD["one slot"]
    right = launched(plan)["y"]

    def is_spoiled(seed: int) -> bool:
        site_of = schedule.Site.__members__[site]
        fault = executor.Disturbance(delay_seed=seed, most_delay_us=100, rank=1, skipped_site=site_of)
        return not np.array_equal(launched(plan, disturbance=fault)["y"], right)

    assert any(is_spoiled(seed) for seed in range(20))


def test_weights_that_never_come_end_in_an_error_that_names_them():
    fault = executor.Disturbance(rank=1, dropped_signal=schedule.Signal.weights_decoded, dropped_index=0)
    with pytest.raises(
        RuntimeError, match=r"rank 1 worker \d gate_up waited 0.3 s for weights_decoded\[0\]: seen 0 of 2"
    ):
        launched(FORWARD["one slot"], disturbance=fault, timeout_seconds=0.3)


def test_passes_that_decode_and_passes_that_do_not_cannot_share_arenas():
    arrays, _, experts = layers()
    matrices: Any = (experts.w_gate, experts.w_up, experts.w_down)
    values = [np.asarray(matrix.values).view(np.uint8) for matrix in matrices]
    scales = [np.asarray(matrix.scales) for matrix in matrices]
    plans = [FORWARD["one slot"], plan_of(1, 0, 2, 2, 3, 2, slots=0)]
    weights = schedule.Format("float8_e4m3fn", 1, 2**31 - 1)
    with pytest.raises(ValueError, match="all passes decode weights that have scales, or none does"):
        executor.run_passes(SHAPE, plans, *arrays, *values, weights=weights, scales=scales)
