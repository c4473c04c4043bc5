"""Timelines of the kernel: all of the schedule's work, each item once, in lanes that do not overlap."""

from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import machine, native
from jaxmoe.implementations.megakernel.plan_defaults import CHUNK_ROWS
from jaxmoe.profiling import summary, timeline
from jaxmoe.testing import make_inputs
from tests import timeline_checks as checks
from tests.layer_calls import gradients_of, layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
    pytest.mark.skipif(not machine.build_info().timeline, reason="the kernels are built without JAXMOE_TIMELINE=on"),
]

SIZES: dict[str, dict[str, Any]] = {
    "wide tiles": {"tokens": 4096, "hidden": 1024, "intermediate": 768, "num_experts": 8, "top_k": 4},
    "narrow tiles": {"tokens": 64, "hidden": 712, "intermediate": 520, "num_experts": 16, "top_k": 2},
}


MATH_WARPS = 8  # of a block
# What a plan says of chunks and segments decides what is recorded. Experts of "wide tiles" have several segments.
SEGMENT_TILES = {"forward": 0, "backward": 3}
PLAN = jaxmoe.KernelPlan(
    3, 1, 9, CHUNK_ROWS, backward=jaxmoe.KernelPlan(2, 1, 7, CHUNK_ROWS, segment_tiles=SEGMENT_TILES["backward"])
)


@pytest.mark.parametrize(
    ("pass_name", "precision", "kind"),
    [
        ("forward", None, None),
        ("forward", "fp8", None),
        ("forward", None, "mxfp4"),
        ("forward", "fp8", "mxfp4"),
        ("backward", None, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("routing", ["uniform", "one-hot", "unused-slots"])
@pytest.mark.parametrize("size", SIZES)
def test_every_task_and_chunk_is_recorded_once_by_every_lane_that_takes_part_in_it(
    size, routing, pass_name, precision, kind
):
    sizes = SIZES[size]
    if precision is not None or kind is not None:  # a scale for each 128 columns, or 32
        sizes = sizes | {name: -(-sizes[name] // 128) * 128 for name in ("hidden", "intermediate")}
    inputs = make_inputs(3, **sizes, routing=routing, dtype=jnp.bfloat16)
    if kind is not None:
        inputs = inputs._replace(experts=jaxmoe.quantize(inputs.experts, kind))
    function = layer("all devices", implementation="megakernel", plan=PLAN, precision=precision)
    call = jax.jit(function) if pass_name == "forward" else gradients_of(function)
    recorded = timeline.record(lambda: [call(inputs) for _ in range(3)], pass_name=pass_name)
    ranks = jax.device_count()
    assert [each.rank for each in recorded] == list(range(ranks))
    shape = native.schedule().Shape(
        ranks, sizes["tokens"] // ranks, sizes["hidden"], sizes["intermediate"], sizes["num_experts"], sizes["top_k"]
    )
    for each in recorded:
        blocks = len(each.sms)
        assert len(set(each.sms.tolist())) == blocks
        schedule = checks.schedule_of("gpu", workers=blocks // 2, segment_tiles=SEGMENT_TILES[pass_name])
        rows = checks.rows_per_expert(np.asarray(inputs.topk_ids), sizes["num_experts"], ranks, each.rank)
        rows = checks.filled_up(schedule, rows)
        checks.check_times(each)
        checks.check_dispatch(each, shape, schedule, rows)
        # Of few tokens several warps add up one, when all is answered; so do those that decode, who are for few.
        few_tokens = 2 * shape.tokens <= blocks * MATH_WARPS or kind is not None
        checks.check_ends(each, blocks, combining_lanes=2, early_sums=not few_tokens)
        check_tasks(each, checks.all_tasks(shape, schedule, rows), schedule)
        numbers = summary.summarize(each)
        assert (numbers.hidden is None) == (ranks == 1)
        # With one-hot routing one rank has all rows.
        assert (0 < numbers.multiplying < 1) if sum(rows) else numbers.multiplying == 0


LOADS = dict.fromkeys(checks.WAITS, "load_gradient") | {"gate_up": "load_gate_up", "down": "load_down"}


def check_tasks(recorded: timeline.Timeline, tasks: list, schedule) -> None:
    """Both blocks of a cluster take part in every task; in narrow ones each has a column tile, or half of one."""
    products, expected = defaultdict(Counter), defaultdict(Counter)
    for task in tasks:
        gemm = task.gemm.name
        is_narrow = task.rows <= schedule.narrow_rows and gemm not in summary.WEIGHT_GRADIENTS
        is_shared = gemm == "down" and task.column_tiles == 1
        for part in (task.column_tile, task.column_tile + (1 if is_narrow and not is_shared else 0)):
            products[gemm][task.expert, task.row_tile, part] += 1
            expected[LOADS[gemm]][task.expert, task.row_tile, part] += 1
            expected[checks.WAITS[gemm]][task.expert, task.row_tile, part] += 1
    for kind in {*LOADS.values(), *checks.WAITS.values()}:
        assert checks.subjects(recorded, kind) == expected[kind], kind
    for gemm in checks.WAITS:
        # Both warpgroups, where they have rows.
        assert not checks.subjects(recorded, gemm) - (products[gemm] + products[gemm]), gemm
    everything = sum(products.values(), Counter())
    assert checks.subjects(recorded, *checks.WAITS, "no_rows") == everything + everything
    assert checks.subjects(recorded, "wait_stages") == everything + everything
    # A warpgroup without rows has stages and biases left to deal with in a backward pass.
    others = ("no_rows",) if recorded.pass_name == "backward" else ()
    assert checks.subjects(recorded, "epilogue") == checks.subjects(recorded, *checks.WAITS, *others)
    # What goes back to the tokens' owners.
    answers = Counter(recorded.of("answers")["row_tile"].tolist())
    assert answers == Counter(recorded.of("down", "token_gradient")["row_tile"].tolist())


def test_the_clocks_of_all_sms_agree_with_the_common_timer():
    inputs = make_inputs(3, **SIZES["wide tiles"], dtype=jnp.bfloat16)
    call = jax.jit(layer("all devices", implementation="megakernel"))
    for each in timeline.record(lambda: [call(inputs) for _ in range(20)]):
        assert (each.clock_ghz > 0.5).all()
        assert (each.clock_ghz < 2.5).all()
        assert each.clock_ghz.max() < 1.05 * each.clock_ghz.min()
