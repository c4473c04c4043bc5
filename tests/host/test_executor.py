"""The host executor on its own: layers and their gradients back to back, whatever the timing; and what it says when a
signal is missing.
"""

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
        "topk_ids": ids,
        "topk_weights": uniform(LAUNCHES, RANKS, TOKENS, TOP_K),
        "w_gate": uniform(EXPERTS, HIDDEN, INTERMEDIATE),
        "w_up": uniform(EXPERTS, HIDDEN, INTERMEDIATE),
        "w_down": uniform(EXPERTS, INTERMEDIATE, HIDDEN),
        "dy": uniform(LAUNCHES, RANKS, TOKENS, HIDDEN),
    }


def run_passes(*plans, **options: Any) -> dict[str, np.ndarray]:
    """The results of all launches, by name: [launches, ranks, ...]."""
    return executor.run_passes(SHAPE, plans, **arguments(), **options)


def run(plan=SMALL_RING, **options: Any) -> np.ndarray:
    return run_passes(plan, **options)["y"]


@functools.cache
def expected() -> np.ndarray:
    a = arguments()
    x = a["x"].astype(np.float64)
    y = np.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = x @ a["w_gate"][expert], x @ a["w_up"][expert]
        out = (gate / (1 + np.exp(-gate)) * up) @ a["w_down"][expert]
        y += (a["topk_weights"] * (a["topk_ids"] == expert)).sum(-1, keepdims=True) * out
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
        ("histograms_written", 0, "sort", "0 of 1"),
        ("inputs_published", 0, "publish", "0 of 2"),
        ("rows_arrived", 1, "gate_up", "0 of [1-4]"),
        ("h_written", 2, "down", "0 of 3"),
        ("answers_written", 0, "dispatch", "0 of 3"),
        ("tasks_done", 0, "announce", "0 of 2"),
    ],
)
def test_a_missing_release_is_named_with_rank_worker_role_and_counts(signal, index, site, counts):
    fault = executor.Disturbance(rank=1, dropped_signal=schedule.Signal.__members__[signal], dropped_index=index)
    with pytest.raises(
        RuntimeError, match=rf"rank 1 worker \d {site} waited 0.3 s for {signal}\[{index}\]: seen {counts}\."
    ):
        run(disturbance=fault, timeout_seconds=0.3)


@pytest.mark.parametrize(("signal", "site"), [("inputs_ready", "walk"), ("answers_ready", "combine")])
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


# --- gradients --------------------------------------------------------------------------------------------------------


def backward(tile, unit_tiles, lag_units, ring_tiles, workers, chunk_rows, dispatchers, **options: int):
    return schedule.Schedule(
        schedule.TileSizes(*tile),
        unit_tiles,
        lag_units,
        ring_tiles,
        workers,
        chunk_rows,
        dispatchers,
        **{"narrow_rows": 0, "keep_tokens": 0} | options,
    )


# Experts have about 27 rows, in one launch one of them has them all.
GRADIENTS_SMALL_RING = backward((4, 16, 8), 2, 1, 7, 2, 3, 4, segment_tiles=3, keep_tokens=1)
GRADIENT_SCHEDULES = {
    "no lag, ring of one tile": backward((4, 16, 8), 1, 0, 1, 1, 4, 1, segment_tiles=1),
    "small ring": GRADIENTS_SMALL_RING,
    "small ring, units of one": backward((4, 16, 8), 1, 1, 5, 3, 4, 3, segment_tiles=3),
    "long lag": backward((4, 40, 24), 3, 4, 27, 3, 2, 3, segment_tiles=3),
    "everything fits": backward((8, 7, 5), 8, 1, 256, 2, 8, 2, segment_tiles=40, keep_tokens=1),
    "everything fits, two segments": backward((8, 7, 5), 8, 1, 256, 2, 8, 2, segment_tiles=2),
    "narrow tiles, small ring": backward((4, 16, 8), 2, 1, 7, 2, 3, 4, segment_tiles=3, narrow_rows=2, keep_tokens=1),
    "every last tile is narrow": backward((8, 7, 5), 8, 1, 256, 2, 8, 2, segment_tiles=40, narrow_rows=8),
    "rows of zeros": backward((16, 16, 8), 1, 0, 2, 2, 5, 2, segment_tiles=2),
}
NAMES = ("dx", "dtopk_weights", "dw_gate", "dw_up", "dw_down")


def gradients(plan=GRADIENTS_SMALL_RING, **options: Any) -> dict[str, np.ndarray]:
    return run_passes(plan, **options)


@functools.cache
def expected_gradients() -> dict[str, np.ndarray]:
    a = {name: array.astype(np.float64) for name, array in arguments().items()}
    x, dy = (a[name].reshape(LAUNCHES, -1, HIDDEN) for name in ("x", "dy"))
    found = {"dx": np.zeros_like(x), "dtopk_weights": np.zeros_like(a["topk_weights"])}
    found |= {f"d{name}": np.zeros((LAUNCHES, *a[name].shape)) for name in ("w_gate", "w_up", "w_down")}
    for expert in range(EXPERTS):
        w_gate, w_up, w_down = (a[name][expert] for name in ("w_gate", "w_up", "w_down"))
        slots = arguments()["topk_ids"] == expert
        weight = (a["topk_weights"] * slots).sum(-1).reshape(LAUNCHES, -1, 1)
        gate, up = x @ w_gate, x @ w_up
        s = 1 / (1 + np.exp(-gate))
        h, dh = gate * s * up, dy @ w_down.T
        dgate, dup = weight * dh * up * s * (1 + gate * (1 - s)), weight * dh * gate * s
        found["dx"] += dgate @ w_gate.T + dup @ w_up.T
        found["dtopk_weights"] += slots * (h * dh).sum(-1).reshape(LAUNCHES, RANKS, TOKENS, 1)
        found["dw_gate"][:, expert] = x.swapaxes(1, 2) @ dgate
        found["dw_up"][:, expert] = x.swapaxes(1, 2) @ dup
        found["dw_down"][:, expert] = (weight * h).swapaxes(1, 2) @ dy
    return found


def assert_gradients_are_those_of_the_dense_layer(found: dict[str, np.ndarray]) -> None:
    assert set(NAMES) <= set(found)
    for name in NAMES:
        want = expected_gradients()[name]
        np.testing.assert_allclose(found[name].reshape(want.shape), want, rtol=1e-5, atol=1e-4, err_msg=name)


def assert_same_bits(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name in NAMES:
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)


@pytest.mark.parametrize("plan", GRADIENT_SCHEDULES)
def test_gradients_back_to_back_equal_those_of_the_dense_layer_for_every_schedule(plan):
    assert_gradients_are_those_of_the_dense_layer(gradients(GRADIENT_SCHEDULES[plan]))


@pytest.mark.parametrize("plan", GRADIENT_SCHEDULES)
def test_an_expert_without_rows_gets_gradients_of_exactly_zero(plan):
    found = gradients(GRADIENT_SCHEDULES[plan])
    for name in ("dw_gate", "dw_up", "dw_down"):
        of_experts = found[name].reshape(LAUNCHES, EXPERTS, -1)
        assert not of_experts[2, [0, 1, 2, 3, 4, 6, 7]].any(), "one expert gets all rows of this launch"
        assert of_experts[2, 5].any()
        assert of_experts[3].any(axis=-1).all(), "of the next one every expert has some"


@pytest.mark.parametrize("plan", GRADIENT_SCHEDULES)
def test_an_unused_slot_has_a_weight_gradient_of_exactly_zero(plan):
    dtopk_weights = gradients(GRADIENT_SCHEDULES[plan])["dtopk_weights"]
    assert ((arguments()["topk_ids"] >= 0) == (dtopk_weights != 0)).all()


def test_every_schedule_and_every_run_gives_the_same_bits_of_gradients():
    """Where sums are cut alike: those over rows at segments, those over columns of a routing weight at column tiles."""
    seen = {}
    for plan in GRADIENT_SCHEDULES.values():
        rows = plan.tile.rows, plan.segment_tiles
        cuts = {"dx": (), "dtopk_weights": (plan.tile.columns,), "dw_gate": rows, "dw_up": rows, "dw_down": rows}
        for _ in range(4):
            found = gradients(plan)
            for name, cut in cuts.items():
                np.testing.assert_array_equal(found[name], seen.setdefault((name, cut), found[name]), err_msg=name)
    assert len([cut for name, cut in seen if name == "dw_gate"]) == 5, "several schedules have the same segments"


@pytest.mark.parametrize("seed", range(3 * len(GRADIENT_SCHEDULES)))
def test_delays_at_every_signal_change_no_bit_of_a_gradient(seed):
    plan = list(GRADIENT_SCHEDULES.values())[seed % len(GRADIENT_SCHEDULES)]
    delays = executor.Disturbance(delay_seed=seed, most_delay_us=[20, 100][seed % 2])
    assert_same_bits(gradients(plan, disturbance=delays), gradients(plan))


@pytest.mark.parametrize(
    ("signal", "index", "site", "counts"),
    [
        ("histograms_written", 0, "sort", "0 of 1"),
        ("inputs_published", 0, "publish", "0 of 2"),
        ("rows_arrived", 1, "gate_up", "0 of [1-4]"),
        ("h_written", 2, "h_gradient", "0 of 3"),
        ("h_gradients_written", 1, "token_gradient", "0 of 5"),
        ("answers_written", 0, "dispatch", "0 of 3"),
        ("weight_gradients_written", 0, "dispatch", "0 of 90"),
        ("tasks_done", 0, "announce", "0 of 2"),
    ],
)
def test_a_release_that_a_backward_pass_misses_is_named_with_rank_worker_role_and_counts(signal, index, site, counts):
    assert_named(GRADIENTS_SMALL_RING, signal, index, site, counts)


@pytest.mark.parametrize(
    ("signal", "counts"), [("h_gradients_written", "0 of 5"), ("weight_gradients_written", "0 of 90")]
)
def test_a_release_that_weight_gradients_miss_is_named_where_workers_and_ring_suffice_to_come_so_far(signal, counts):
    plan = backward((4, 16, 8), 1, 0, 64, 8, 4, 8, segment_tiles=3)
    assert_named(plan, signal, 0, "weight_gradient", counts)


def assert_named(plan, signal: str, index: int, site: str, counts: str) -> None:
    fault = executor.Disturbance(rank=1, dropped_signal=schedule.Signal.__members__[signal], dropped_index=index)
    with pytest.raises(
        RuntimeError, match=rf"rank 1 worker \d {site} waited 0.3 s for {signal}\[{index}\]: seen {counts}\."
    ):
        gradients(plan, disturbance=fault, timeout_seconds=0.3)


@pytest.mark.parametrize(("signal", "site"), [("inputs_ready", "walk"), ("answers_ready", "combine")])
def test_a_peer_that_never_signals_in_a_backward_pass_is_named_by_the_rank_that_waits(signal, site):
    fault = executor.Disturbance(rank=1, dropped_signal=schedule.Signal.__members__[signal], dropped_index=3)
    with pytest.raises(
        RuntimeError, match=rf"rank 3 worker \d {site} waited 0.3 s for {signal}\[1\]: seen 0 of 1 \(from rank 1\)\."
    ):
        gradients(disturbance=fault, timeout_seconds=0.3)


@pytest.mark.parametrize("site", ["dispatch", "gate_up", "h_gradient", "token_gradient", "weight_gradient"])
def test_a_wait_that_a_rank_leaves_out_spoils_the_gradients(site):
    """Of dispatch: a ring slot that is taken too early. One task of a unit follows the other, on another worker."""
    plan = backward((4, 40, 40), 1, 0, 2, 3, 2, 6, segment_tiles=2)
    right, skipped = gradients(plan), schedule.Site.__members__[site]

    def is_spoiled(seed: int) -> bool:
        fault = executor.Disturbance(delay_seed=seed, most_delay_us=50, rank=1, skipped_site=skipped)
        found = gradients(plan, disturbance=fault)
        return any(not np.array_equal(found[name], right[name]) for name in NAMES)

    assert any(is_spoiled(seed) for seed in range(10))


PAIRS = list(zip(SCHEDULES, [*GRADIENT_SCHEDULES][::-1], strict=False))


@pytest.mark.parametrize(("forward_plan", "backward_plan"), PAIRS)
def test_forward_and_backward_passes_take_turns_in_one_arena(forward_plan, backward_plan):
    forward, backward = SCHEDULES[forward_plan], GRADIENT_SCHEDULES[backward_plan]
    delays = executor.Disturbance(delay_seed=len(forward_plan), most_delay_us=50)
    found = run_passes(forward, backward, disturbance=delays)
    np.testing.assert_array_equal(found["y"], run(forward))
    assert_same_bits(found, gradients(backward))


def test_arguments_of_another_size_are_refused():
    for name, complaint in (("x", "x does not have the shape's size"), ("dy", "dy does not have the size of x")):
        wrong = arguments() | {name: arguments()[name][..., :-1]}
        with pytest.raises(ValueError, match=complaint):
            executor.run_passes(SHAPE, [GRADIENTS_SMALL_RING], **wrong)
    with pytest.raises(ValueError, match="passes must name a schedule"):
        executor.run_passes(SHAPE, [], **arguments())
