"""Timelines of the kernel: all of the schedule's work, each item once, in lanes that do not overlap."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import native
from jaxmoe.profiling import summary, timeline
from jaxmoe.testing import make_inputs
from tests import timeline_checks as checks
from tests.layer_suite import layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.cuda_status().available, reason=native.cuda_status().reason or "the CUDA part runs"),
    pytest.mark.skipif(not native.build_info().timeline, reason="the kernels are built without JAXMOE_TIMELINE=on"),
]

SIZES: dict[str, dict[str, Any]] = {
    "wide tiles": {"tokens": 4096, "hidden": 1024, "intermediate": 768, "num_experts": 8, "top_k": 4},
    "narrow tiles": {"tokens": 64, "hidden": 712, "intermediate": 520, "num_experts": 16, "top_k": 2},
}


@pytest.mark.parametrize("routing", ["uniform", "one-hot", "unused-slots"])
@pytest.mark.parametrize("size", SIZES)
def test_every_task_and_chunk_is_recorded_once_by_every_lane_that_takes_part_in_it(size, routing):
    sizes = SIZES[size]
    inputs = make_inputs(3, **sizes, routing=routing, dtype=jnp.bfloat16)
    call = jax.jit(layer("all devices", implementation="megakernel"))
    recorded = timeline.record(lambda: [call(inputs) for _ in range(3)])
    ranks = jax.device_count()
    assert [each.rank for each in recorded] == list(range(ranks))
    shape = native.schedule().Shape(
        ranks, sizes["tokens"] // ranks, sizes["hidden"], sizes["intermediate"], sizes["num_experts"], sizes["top_k"]
    )
    for each in recorded:
        blocks = len(each.sms)
        assert len(set(each.sms.tolist())) == blocks
        schedule = checks.schedule_of("gpu", workers=blocks // 2)
        rows = checks.rows_per_expert(np.asarray(inputs.topk_ids), sizes["num_experts"], ranks, each.rank)
        checks.check_times(each)
        checks.check_dispatch(each, shape, schedule, rows)
        checks.check_ends(each, blocks, combining_lanes=2)
        check_tasks(each, checks.all_tasks(shape, schedule, rows), schedule)
        numbers = summary.summarize(each)
        assert (numbers.hidden is None) == (ranks == 1)
        # With one-hot routing one rank has all rows.
        assert (0 < numbers.multiplying < 1) if sum(rows) else numbers.multiplying == 0


def check_tasks(recorded: timeline.Timeline, tasks: list, schedule) -> None:
    """The two blocks of a cluster take part in every task, with a column tile of their own in narrow ones."""
    of_block: dict[str, Counter] = {"gate_up": Counter(), "down": Counter()}
    of_cluster: dict[str, Counter] = {"gate_up": Counter(), "down": Counter()}
    for task in tasks:
        second = task.column_tile + (1 if task.rows <= schedule.narrow_rows else 0)
        for part in (task.column_tile, second):
            of_block[task.gemm.name][task.expert, task.row_tile, part] += 1
            of_cluster[task.gemm.name][task.expert, task.row_tile, task.column_tile] += 1
    for kind, waited, loaded in (("gate_up", "wait_rows", "load_gate_up"), ("down", "wait_hidden", "load_down")):
        assert checks.subjects(recorded, waited) == of_cluster[kind]
        assert checks.subjects(recorded, loaded) == of_block[kind]
        # Both warpgroups, where they have rows.
        assert not checks.subjects(recorded, kind) - (of_block[kind] + of_block[kind])
    everything = of_block["gate_up"] + of_block["down"]
    assert checks.subjects(recorded, "gate_up", "down", "no_rows") == everything + everything
    assert checks.subjects(recorded, "wait_stages") == everything + everything
    assert checks.subjects(recorded, "epilogue") == checks.subjects(recorded, "gate_up", "down")
    answers = Counter(recorded.of("answers")["row_tile"].tolist())
    assert answers == Counter(recorded.of("down")["row_tile"].tolist())


def test_the_clocks_of_all_sms_agree_with_the_common_timer():
    inputs = make_inputs(3, **SIZES["wide tiles"], dtype=jnp.bfloat16)
    call = jax.jit(layer("all devices", implementation="megakernel"))
    for each in timeline.record(lambda: [call(inputs) for _ in range(20)]):
        assert (each.clock_ghz > 0.5).all()
        assert (each.clock_ghz < 2.5).all()
        assert each.clock_ghz.max() < 1.05 * each.clock_ghz.min()
