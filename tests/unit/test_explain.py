"""`explain`, `default_plan` and the choice of implementation."""

import dataclasses
import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmoe
from jaxmoe.activation import ACTIVATIONS
from jaxmoe.formats import Format, Formats
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.implementations.base import ROWS_OVER_BALANCED
from jaxmoe.implementations.megakernel import plan_defaults as kernel_defaults
from jaxmoe.implementations.megakernel.plan_defaults import backward_plan, kept_plan
from jaxmoe.implementations.megakernel.schedule import most_row_tiles, tile_sizes
from jaxmoe.implementations.xla import plan as xla_plans
from jaxmoe.plan import KernelPlan, Shape, default_plan
from jaxmoe.testing import make_inputs
from tests.layer_calls import mesh_of


def abstract(tokens: int, hidden: int, intermediate: int, num_experts: int, top_k: int):
    shape = jax.ShapeDtypeStruct
    experts = jax.eval_shape(
        lambda: jaxmoe.Experts.init(jax.random.key(0), num_experts, hidden, intermediate, dtype=jnp.bfloat16)
    )
    slots = shape((tokens, top_k), jnp.int32), shape((tokens, top_k), jnp.float32)
    return shape((tokens, hidden), jnp.bfloat16), *slots, experts


def test_it_says_what_runs_why_and_what_it_costs_without_running_anything():
    arguments = abstract(8 * 8192, 4096, 14336, 8, 2)
    told = jaxmoe.explain(*arguments, mesh=mesh_of("expert"))
    text = str(told)
    assert told.implementation == "xla"
    assert told.flops == 6 * 8192 * 2 * 4096 * 14336
    # The other seven ranks' tokens and sums, BF16, and an id and a weight of 4 bytes for each of their slots.
    assert told.wire_bytes == 7 * 8192 * (2 * 2 * 4096 + 8 * 2)
    for part in ("8 ranks of expert", "implementation=None", "batch_rows=20480", "whatever the routing", "MiB"):
        assert part in text
    for size in told.memory_bytes.values():
        assert size >= 0
    assert sum(told.memory_bytes.values()) < told.worst_case_bytes


def test_a_named_implementation_is_the_one_that_runs():
    arguments = make_inputs(0)[:4]
    for name in ("megakernel", "xla", "reference"):
        told = jaxmoe.explain(*arguments, axis_name=None, implementation=name)
        assert told.implementation == name
        assert "was asked for" in str(told)


def test_a_plan_for_an_implementation_that_there_is_not_is_refused():
    shape = Shape(tokens=64, hidden=32, intermediate=64, num_experts=4, top_k=2)
    told = r"default_plan: implementation='megakernal' is not known. Use one of 'megakernel', 'xla', 'reference'\.$"
    with pytest.raises(ValueError, match=told):
        default_plan(shape, "cpu", "megakernal")


@pytest.mark.parametrize("activation", [*ACTIVATIONS, jaxmoe.SwiGLU.gpt_oss()], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_said_can_be_pickled_and_is_a_key(implementation, activation):
    told = jaxmoe.explain(*make_inputs(0)[:4], axis_name=None, activation=activation, implementation=implementation)
    again = pickle.loads(pickle.dumps(told))
    assert again == told
    assert str(again) == str(told)
    assert {told: "found"}[again] == "found"
    assert told != dataclasses.replace(told, memory_bytes={})


def test_a_passed_plan_is_the_one_that_is_used():
    plan = jaxmoe.Plan(batch_rows=77)
    assert jaxmoe.explain(*make_inputs(0)[:4], axis_name=None, plan=plan).call.plan == plan


@given(
    tokens=st.integers(0, 70_000),
    top_k=st.integers(1, 32),
    ranks=st.sampled_from([1, 2, 4, 8, 64]),
    platform=st.sampled_from(["cpu", "gpu", "tpu"]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32]),
)
def test_the_default_plan_bounds_memory_and_gives_a_reason_for_every_choice(tokens, top_k, ranks, platform, dtype):
    shape = Shape(tokens, hidden=64, intermediate=64, num_experts=64, top_k=top_k, ranks=ranks)
    plan = default_plan(dataclasses.replace(shape, formats=Formats.of(dtype)), platform)
    assert 1 <= plan.batch_rows <= max(shape.all_slots, 1)
    roomy = ROWS_OVER_BALANCED * shape.balanced_rows + xla_plans.ROW_TILE
    assert plan.batch_rows <= max(xla_plans.WORST_CASE_ROWS, roomy)
    assert [reason.split("=")[0] for reason in plan.reasons] == ["batch_rows", "grouped_gemm"]
    assert all(": " in reason for reason in plan.reasons)


@given(
    tokens=st.integers(0, 70_000),
    hidden=st.integers(1, 20_000),
    experts_per_rank=st.integers(1, 64),
    top_k=st.integers(1, 32),
    ranks=st.sampled_from([1, 2, 4, 8]),
    gated=st.booleans(),
    platform=st.sampled_from(["cpu", "gpu"]),
)
def test_the_default_kernel_plan_is_legal_bounds_memory_and_gives_a_reason_for_every_choice(
    tokens, hidden, experts_per_rank, top_k, ranks, gated, platform
):
    shape = Shape(tokens, hidden, 64, ranks * experts_per_rank, top_k, ranks, gated=gated)
    plan = default_plan(shape, platform, "megakernel")
    most = most_row_tiles(shape, platform)
    assert min(plan.fewest_ring_tiles, most) <= plan.ring_tiles <= most
    assert plan.backward is None
    backward = backward_plan(plan, shape, platform)
    assert backward.segment_tiles >= backward.unit_tiles
    assert min(backward.fewest_ring_tiles, most) <= backward.ring_tiles <= most
    for choice in ("segment_tiles", "unit_tiles", "lag_units", "ring_tiles", "chunk_rows", "keep_tokens"):
        assert any(reason.startswith(f"{choice}={getattr(backward, choice)}: ") for reason in backward.reasons)
    rows = plan.unit_tiles * tile_sizes(shape, platform).rows
    if platform == "gpu":
        assert (
            plan.unit_tiles <= kernel_defaults.FEWEST_UNIT_TILES
            or rows * shape.token_bytes <= kernel_defaults.UNIT_BYTES
        )
    # Whatever the number of tokens, the rings hold a few units beyond the lag.
    assert plan.lag_units <= kernel_defaults.MOST_LAG_UNITS
    assert plan.ring_tiles <= plan.lag_units * plan.unit_tiles + max(3 * plan.unit_tiles, 16)
    assert [reason.split("=")[0] for reason in plan.reasons] == [
        "unit_tiles",
        "lag_units",
        "ring_tiles",
        "chunk_rows",
        "keep_tokens",
        *(["share_columns"] if plan.share_columns else []),
    ]
    assert not (plan.keep_tokens and ranks == 1)
    assert all(": " in reason for reason in plan.reasons)


@given(
    tokens=st.sampled_from([1, 64, 1024, 8192]),
    hidden=st.sampled_from([128, 2048, 7168, 65536]),
    intermediate=st.sampled_from([128, 768, 2048, 32768]),
    experts=st.sampled_from([1, 2, 8, 32, 256]),
    top_k=st.sampled_from([1, 2, 8]),
    ranks=st.sampled_from([1, 2, 8]),
    weights=st.sampled_from(
        [
            Format(jnp.bfloat16),
            Format(jnp.float8_e4m3fn, 128, 128, jnp.float32),
            Format(jnp.float4_e2m1fn, 1, 32, jnp.float8_e8m0fnu),
        ]
    ),
)
def test_every_reason_of_a_plan_names_the_value_that_the_plan_has(
    tokens, hidden, intermediate, experts, top_k, ranks, weights
):
    formats = dataclasses.replace(Formats.of(jnp.bfloat16), weights=weights)
    shape = Shape(tokens, hidden, intermediate, ranks * experts, top_k, ranks, formats=formats)
    plan = default_plan(shape, "gpu", "megakernel")
    for each in (plan, kept_plan(plan, shape, "gpu"), backward_plan(plan, shape, "gpu")):
        named = [reason.split(": ")[0] for reason in each.reasons]
        assert len({name.split("=")[0] for name in named}) == len(named)
        for name in named:
            choice, value = name.split("=")
            assert str(getattr(each, choice)) == value
        # Of a ring that is cut to the tiles that a rank can have, the reason is that.
        cut = each.ring_tiles == most_row_tiles(shape, "gpu")
        assert not (cut and any("more, of" in reason for reason in each.reasons))


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize(("local_experts", "ranks", "top_k"), [(1, 8, 3), (2, 4, 3), (1, 4, 4), (4, 2, 2), (3, 1, 2)])
def test_pulls_of_a_token_are_those_of_all_sets_of_experts_that_it_can_have(local_experts, ranks, top_k, hosts):
    of_host = local_experts * ranks
    sets = list(itertools.combinations(range(hosts * of_host), top_k))
    # Of the token's own rank, which is the first one of this host, nothing is pulled.
    peers = [[expert // local_experts for expert in chosen if local_experts <= expert < of_host] for chosen in sets]
    shape = Shape(1, 8, 8, of_host, top_k, ranks, used_slots=1 / hosts)
    of_slots, of_ranks = kernel_defaults.pulls_per_token(shape)
    assert of_slots == pytest.approx(sum(map(len, peers)) / len(sets))
    assert of_ranks == pytest.approx(sum(len(set(each)) for each in peers) / len(sets), abs=1e-6)


def test_nobody_pulls_a_token_without_experts():
    assert kernel_defaults.pulls_per_token(Shape(0, 8, 8, 8, 2, 4, used_slots=0.0)) == (0, 0)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "ranks", "keeps"),
    [(128, 8, 4, True), (128, 8, 8, True), (256, 8, 8, True), (128, 4, 4, False), (8, 2, 4, False), (8, 8, 8, False)],
)
def test_tokens_are_kept_where_that_saves_about_a_third_of_the_pulls(num_experts, top_k, ranks, keeps):
    plan = default_plan(Shape(8192, 2048, 768, num_experts, top_k, ranks), "gpu", "megakernel")
    assert plan.keep_tokens == keeps


def test_sums_at_experts_are_fewer_rows_on_the_wire_and_more_memory():
    x = jax.ShapeDtypeStruct((4 * 8192, 2048), jnp.bfloat16)
    ids, weights = (jax.ShapeDtypeStruct((4 * 8192, 8), dtype) for dtype in (jnp.int32, jnp.float32))
    experts = jax.eval_shape(lambda: jaxmoe.Experts.init(jax.random.key(0), 128, 2048, 768, dtype=jnp.bfloat16))
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    told, with_sums = (
        jaxmoe.explain(x, ids, weights, experts, mesh=mesh, implementation="megakernel", plan=plan)
        for plan in (KernelPlan(5, 1, 20), KernelPlan(5, 1, 20, sum_at_experts=True))
    )
    none_of_a_rank = math.comb(96, 8) / math.comb(128, 8)
    remote, ranks = 6 * 8192, int(3 * (1 - none_of_a_rank) * 8192)
    assert told.wire_bytes == remote * (2 * 4096 + 4)
    assert with_sums.wire_bytes == remote * (4096 + 8) + ranks * (4096 + 4)
    more = with_sums.memory_bytes["arena: answers"] - told.memory_bytes["arena: answers"]
    assert more >= (1.25 * 8 * 8192 + 4 * 8192) * 4096


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        # Of each expert 32 rows and 8 pairs of column tiles: 32 down tasks on two ranks, 64 on one.
        ({"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2, "ranks": 2}, True),
        ({"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2, "ranks": 1}, False),
        ({"hidden": 4096, "intermediate": 14336, "num_experts": 16, "top_k": 2, "ranks": 8}, True),
        ({"hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8, "ranks": 2}, False),
    ],
)
def test_blocks_share_columns_where_half_of_the_workers_would_have_no_down_task(sizes, shares):
    plan = default_plan(Shape(tokens=64, **sizes), "gpu", "megakernel")
    assert plan.share_columns == shares
    assert any(reason.startswith("share_columns=True: ") for reason in plan.reasons) == shares
    many = default_plan(Shape(tokens=8192, **sizes), "gpu", "megakernel")
    assert not many.share_columns
    assert not default_plan(Shape(tokens=64, **sizes), "cpu", "megakernel").share_columns
    # Those that are decoded where they are multiplied too; not those that are so ahead, here of float16.
    mxfp4 = Format(jnp.float4_e2m1fn, 1, 32, jnp.float8_e8m0fnu)
    for dtype, in_registers in ((jnp.bfloat16, True), (jnp.float16, False)):
        formats = dataclasses.replace(Formats.of(dtype), weights=mxfp4)
        plan = default_plan(Shape(tokens=64, **sizes, formats=formats), "gpu", "megakernel")
        assert plan.share_columns == (shares and in_registers)
        assert (plan.weight_slots == 0) == in_registers


@pytest.mark.parametrize(
    ("sizes", "tokens", "lag_units"),
    [
        # Of an expert 16 tiles of down columns, in pairs 8, of which 66 workers take those of 8 experts at once; of two
        # ranks all 4 experts, whose blocks share columns.
        ({"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2, "ranks": 1}, 64, 7),
        ({"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2, "ranks": 2}, 64, 3),
        # More rows than a narrow tile has: no pairs.
        ({"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2, "ranks": 1}, 1024, 3),
        # 12 pairs: those of 5 experts.
        ({"hidden": 6144, "intermediate": 16384, "num_experts": 8, "top_k": 2, "ranks": 1}, 64, 4),
        # Down tasks are no longer than the others, or units are large.
        ({"hidden": 2880, "intermediate": 2880, "num_experts": 128, "top_k": 4, "ranks": 1}, 64, 9),
        ({"hidden": 7168, "intermediate": 2048, "num_experts": 128, "top_k": 8, "ranks": 2}, 64, 13),
        ({"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2, "ranks": 2}, 8192, 1),
    ],
)
def test_long_down_tasks_that_come_last_are_whole_rounds_of_workers(sizes, tokens, lag_units):
    plan = default_plan(Shape(tokens=tokens, **sizes), "gpu", "megakernel")
    assert plan.lag_units == lag_units
    assert plan.ring_tiles >= (lag_units + 1) * plan.unit_tiles
    assert sum(reason.startswith(f"lag_units={lag_units}: ") for reason in plan.reasons) == 1
    assert default_plan(Shape(tokens=tokens, **sizes), "cpu", "megakernel").lag_units == 1
    # Decoded ahead, here of float16, a lag is as long as there is memory for: slots of the experts in between.
    mxfp4 = Format(jnp.float4_e2m1fn, 1, 32, jnp.float8_e8m0fnu)
    formats = dataclasses.replace(Formats.of(jnp.float16), weights=mxfp4)
    ahead = default_plan(Shape(tokens=tokens, **sizes, formats=formats), "gpu", "megakernel")
    assert ahead.weight_slots > ahead.lag_units


@pytest.mark.parametrize(
    ("tokens", "chunks", "chunks_in_registers"), [(64, 1, 1), (80, 1, 2), (128, 2, 2), (8192, 4, 4)]
)
def test_no_warp_of_a_decode_batch_pulls_twice(tokens, chunks, chunks_in_registers):
    # 4 rows of a token: 396 warps pull one of each of up to 99 tokens. Where weights are decoded in registers they are
    # 264, since one of a block's three releases signals: up to 66 tokens. Of many rows chunks are of one size.
    sizes = {"tokens": tokens, "hidden": 2880, "intermediate": 2880, "num_experts": 128, "top_k": 4, "ranks": 1}
    mxfp4 = Format(jnp.float4_e2m1fn, 1, 32, jnp.float8_e8m0fnu)
    formats = dataclasses.replace(Formats.of(jnp.bfloat16), weights=mxfp4)
    assert default_plan(Shape(**sizes), "gpu", "megakernel").chunk_rows == chunks
    assert default_plan(Shape(**sizes, formats=formats), "gpu", "megakernel").chunk_rows == chunks_in_registers


@pytest.mark.parametrize(
    ("platform", "dtype", "installed", "hidden", "chosen"),
    [
        ("cpu", jnp.bfloat16, True, 64, "ragged_dot"),
        ("gpu", jnp.bfloat16, True, 64, "tokamax"),
        ("cuda", jnp.float16, True, 2880, "tokamax"),
        ("gpu", jnp.float32, True, 64, "ragged_dot"),
        ("gpu", jnp.bfloat16, False, 64, "ragged_dot"),
        ("gpu", jnp.bfloat16, True, 20, "ragged_dot"),
    ],
)
def test_the_grouped_gemm_is_tokamax_on_gpus_where_it_can_be(monkeypatch, platform, dtype, installed, hidden, chosen):
    monkeypatch.setattr(xla_plans, "has_tokamax", lambda: installed)
    shape = Shape(64, hidden=hidden, intermediate=64, num_experts=8, top_k=2, formats=Formats.of(dtype))
    assert default_plan(shape, platform).grouped_gemm == chosen
