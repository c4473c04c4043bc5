"""The host executor on its own: layers back to back, whatever the timing; and what it says when a signal is missing."""

import functools
from typing import Any

import numpy as np
import pytest

import jaxmoe.native as native

RANKS, TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAUNCHES = 4, 20, 24, 40, 8, 3, 6
schedule = native.schedule()
executor = native.executor()
SHAPE = schedule.Shape(RANKS, TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
SMALL_RING = schedule.Schedule(schedule.TileSizes(4, 16, 8), 2, 1, 4, 2, 3, 4, narrow_rows=0, keep_tokens=1)
SCHEDULES = {
    "no lag, ring of one tile": schedule.Schedule(
        schedule.TileSizes(4, 16, 8), 1, 0, 1, 1, 4, 1, narrow_rows=0, keep_tokens=0
    ),
    "small ring": SMALL_RING,
    "long lag": schedule.Schedule(schedule.TileSizes(4, 40, 24), 3, 4, 15, 3, 2, 3, narrow_rows=0, keep_tokens=0),
    "everything fits": schedule.Schedule(schedule.TileSizes(8, 7, 5), 8, 1, 256, 2, 8, 2, narrow_rows=0, keep_tokens=1),
    "narrow tiles, small ring": schedule.Schedule(
        schedule.TileSizes(4, 16, 8), 2, 1, 4, 2, 3, 4, narrow_rows=2, keep_tokens=1
    ),
    "narrow tiles, one column": schedule.Schedule(
        schedule.TileSizes(4, 40, 24), 3, 4, 15, 3, 2, 3, narrow_rows=3, keep_tokens=0
    ),
    "every last tile is narrow": schedule.Schedule(
        schedule.TileSizes(8, 7, 5), 8, 1, 256, 2, 8, 2, narrow_rows=8, keep_tokens=1
    ),
}


@functools.cache
def arguments() -> dict[str, Any]:
    """Six layers with another routing each; the last rank has no tokens of its own in every other one."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, EXPERTS, (LAUNCHES, RANKS, TOKENS, TOP_K)).astype(np.int32)
    ids[1::2, -1] = -1
    ids[2] = np.where(ids[2] >= 0, 5, -1)  # one expert gets everything
    uniform = lambda *shape: rng.uniform(-1, 1, shape).astype(np.float32)  # noqa: E731
    return {
        "x": uniform(LAUNCHES, RANKS, TOKENS, HIDDEN),
        "ids": ids,
        "weights": uniform(LAUNCHES, RANKS, TOKENS, TOP_K),
        "w_gate": uniform(EXPERTS, HIDDEN, INTERMEDIATE),
        "w_up": uniform(EXPERTS, HIDDEN, INTERMEDIATE),
        "w_down": uniform(EXPERTS, INTERMEDIATE, HIDDEN),
    }


def run(plan=SMALL_RING, **options: Any) -> np.ndarray:
    a = arguments()
    return executor.run_layers(
        SHAPE, plan, *(a[name] for name in ("x", "ids", "weights", "w_gate", "w_up", "w_down")), **options
    )


@functools.cache
def expected() -> np.ndarray:
    a = arguments()
    x = a["x"].astype(np.float64)
    y = np.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = x @ a["w_gate"][expert], x @ a["w_up"][expert]
        out = (gate / (1 + np.exp(-gate)) * up) @ a["w_down"][expert]
        y += (a["weights"] * (a["ids"] == expert)).sum(-1, keepdims=True) * out
    return y


@pytest.mark.parametrize("plan", SCHEDULES)
def test_layers_back_to_back_equal_the_dense_layer_for_every_schedule(plan):
    np.testing.assert_allclose(run(SCHEDULES[plan]), expected(), rtol=1e-5, atol=2e-5)


def test_every_schedule_and_every_run_gives_the_same_bits():
    first = run()
    for plan in SCHEDULES.values():
        for _ in range(5):
            np.testing.assert_array_equal(run(plan), first)


@pytest.mark.parametrize("seed", range(3 * len(SCHEDULES)))
def test_delays_at_every_signal_change_no_bit(seed):
    plan = list(SCHEDULES.values())[seed % len(SCHEDULES)]
    delays = executor.Disturbance(delay_seed=seed, most_delay_us=[20, 200][seed % 2])
    np.testing.assert_array_equal(run(plan, disturbance=delays), run())


@pytest.mark.parametrize(
    ("signal", "index", "site", "counts"),
    [
        ("histograms_written", 0, "plan", "0 of 1"),
        ("inputs_staged", 0, "publish", "0 of 2"),
        ("rows_arrived", 1, "gate_up", "0 of [1-4]"),
        ("hidden_written", 2, "down", "0 of 3"),
        ("outputs_written", 0, "dispatch", "0 of 3"),
        ("tasks_done", 0, "announce", "0 of 2"),
    ],
)
def test_a_missing_release_is_named_with_rank_worker_role_and_counts(signal, index, site, counts):
    fault = executor.Disturbance(rank=1, dropped_signal=schedule.Signal.__members__[signal], dropped_index=index)
    with pytest.raises(
        RuntimeError, match=rf"rank 1 worker \d {site} waited 0.3 s for {signal}\[{index}\]: seen {counts}\."
    ):
        run(disturbance=fault, timeout_seconds=0.3)


@pytest.mark.parametrize(("signal", "site"), [("inputs_ready", "walk"), ("partials_written", "combine")])
def test_a_peer_that_never_signals_is_named_by_the_rank_that_waits(signal, site):
    fault = executor.Disturbance(rank=1, dropped_signal=schedule.Signal.__members__[signal], dropped_index=3)
    with pytest.raises(
        RuntimeError, match=rf"rank 3 worker \d {site} waited 0.3 s for {signal}\[1\]: seen 0 of 1 \(from rank 1\)\."
    ):
        run(disturbance=fault, timeout_seconds=0.3)


def test_a_ring_slot_that_is_taken_too_early_spoils_the_result():
    plan = schedule.Schedule(schedule.TileSizes(4, 16, 8), 2, 1, 4, 2, 2, 4, narrow_rows=2, keep_tokens=0)
    wrong = 0
    for seed in range(10):
        fault = executor.Disturbance(
            delay_seed=seed, most_delay_us=50, rank=1, skipped_site=schedule.Site.__members__["dispatch"]
        )
        wrong += not np.array_equal(run(plan, disturbance=fault), run())
    assert wrong > 0


def test_arguments_of_another_size_are_refused():
    a = arguments()
    with pytest.raises(ValueError, match="x does not have the shape's size"):
        executor.run_layers(SHAPE, SMALL_RING, a["x"][..., :-1], *(a[n] for n in list(a)[1:]))
