"""`implementation="megakernel"` runs or says why not before anything runs, whatever is built on this machine."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import call as calls
from jaxmoe import machine, native
from jaxmoe.activation import ACTIVATIONS, Pointwise, compiled_form, resolve
from jaxmoe.formats import Format, Formats
from jaxmoe.implementations.base import Inputs
from jaxmoe.implementations.megakernel import layer, limits
from jaxmoe.implementations.megakernel.plan_defaults import DECODED_BYTES, kept_plan, kernel_plan
from jaxmoe.implementations.megakernel.schedule import weight_slots
from jaxmoe.native import FORWARD
from jaxmoe.options import Arguments, CallOptions
from jaxmoe.plan import KernelPlan, Shape
from jaxmoe.precision import ROWS
from jaxmoe.testing import make_inputs
from tests.layer_calls import mesh_of

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

X, IDS, WEIGHTS, EXPERTS, _ = make_inputs(0, tokens=16, hidden=8, intermediate=16, num_experts=8, top_k=2)
PLAN = KernelPlan(1, 1, 2)
BACKWARD_PLAN = KernelPlan(1, 1, 4, segment_tiles=2)
SUMS = KernelPlan(1, 1, 4, sum_at_experts=True)
# The largest that is allowed on both platforms.
LARGEST = Shape(tokens=2**24 // 32 - 1, hidden=64, intermediate=128, num_experts=4096, top_k=32, ranks=8)


@dataclasses.dataclass(frozen=True)
class Doubled(jaxmoe.SwiGLU):
    """A custom activation that must not be taken for the one it inherits from."""

    def value(self, gate, up):
        return 2 * super().value(gate, up)


def square_relu() -> Pointwise:
    return Pointwise("square_relu", lambda x: jnp.maximum(x, 0) ** 2, lambda x: 2 * jnp.maximum(x, 0))


@pytest.fixture
def both_platforms(monkeypatch):
    """A build that has the forward kernel for both platforms, on a machine with the right GPU."""
    monkeypatch.setattr(native, "targets", lambda platform: frozenset({FORWARD}))
    monkeypatch.setattr(machine, "cuda_status", lambda: machine.CudaStatus(available=True, reason=""))


def check(platform: str = "cpu", dtype: Any = jnp.bfloat16, activation: Any = "silu", plan: Any = PLAN, **sizes: int):
    shape = dataclasses.replace(LARGEST, formats=Formats.of(dtype), **sizes)
    limits.check_megakernel(shape, platform, resolve(activation), plan)


def call(**changes: Any) -> Any:
    options = {"axis_name": None, "implementation": "megakernel"} | changes
    return jaxmoe.moe_layer(X, IDS, WEIGHTS, EXPERTS, **options)


@pytest.mark.usefixtures("both_platforms")
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, jaxmoe.SwiGLU(limit=7.0)], ids=str)
def test_the_largest_sizes_are_taken_on_both_platforms_with_every_activation_of_the_table(platform, activation):
    for dtype in limits.DTYPES[platform]:
        check(platform, dtype, activation)


@pytest.mark.usefixtures("both_platforms")
def test_a_cpu_takes_sizes_and_dtypes_that_a_gpu_does_not():
    check("cpu", jnp.float32, hidden=7, intermediate=5, ranks=256, num_experts=4096)


# What is wrong -> (arguments of check, type, parts of the message: what was given, what is needed, what to do).
WRONG: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "another platform": (
        {"platform": "tpu"},
        NotImplementedError,
        ["for 'tpu'", "runs on cpu and gpu", "implementation='xla'"],
    ),
    "float32 on a GPU": (
        {"platform": "gpu", "dtype": jnp.float32},
        TypeError,
        ["x is float32", "bfloat16 and float16", "Cast x and experts"],
    ),
    "an activation of the user's": (
        {"activation": square_relu()},
        NotImplementedError,
        ["square_relu", "'silu', 'gelu', 'gelu_tanh', 'relu'", "jaxmoe.SwiGLU", "implementation='xla'"],
    ),
    "an activation that inherits from one of ours": (
        {"activation": Doubled()},
        NotImplementedError,
        ["Doubled", "exists in Python only"],
    ),
    "ranks on a GPU": (
        {"platform": "gpu", "ranks": 16},
        ValueError,
        ["over 16 ranks", "at most 8", "data_axes"],
    ),
    "ranks on a CPU": ({"ranks": 512}, ValueError, ["over 512 ranks", "at most 256"]),
    "experts": ({"num_experts": 8192, "ranks": 16}, ValueError, ["num_experts=8192", "at most 4096"]),
    "experts of a rank": (
        {"num_experts": 2048, "ranks": 2},
        ValueError,
        ["num_experts=2048 over 2 ranks, 1024 per rank", "512 per rank", "over more ranks"],
    ),
    "slots of a token": ({"top_k": 33}, ValueError, ["top_k=33", "at most 32"]),
    "slots of a rank": (
        {"tokens": 2**24 // 32},
        ValueError,
        ["524288 tokens per rank x 32 slots", "fewer than 16777216", "several calls"],
    ),
    "hidden on a GPU": (
        {"platform": "gpu", "hidden": 60},
        ValueError,
        ["hidden=60 and intermediate=128", "multiples of 8", "Pad"],
    ),
    "intermediate on a GPU": ({"platform": "gpu", "intermediate": 4}, ValueError, ["intermediate=4", "multiples of 8"]),
    "a ring that would wait for ever": (
        {"plan": KernelPlan(unit_tiles=3, lag_units=2, ring_tiles=8)},
        ValueError,
        [
            "plan has ring_tiles=8",
            "lag_units=2",
            "unit_tiles=3",
            "(lag_units + 1) * unit_tiles = 9",
            "Raise ring_tiles",
        ],
    ),
    "a ring of the backward pass that would wait for ever": (
        {"plan": KernelPlan(1, 1, 2, backward=KernelPlan(3, 2, 16, segment_tiles=5))},
        ValueError,
        ["plan.backward has ring_tiles=16", "segment_tiles=5", "segment_tiles + 2 * lag_units * unit_tiles = 17"],
    ),
    "a plan for a backward pass": (
        {"plan": BACKWARD_PLAN},
        ValueError,
        ["plan has segment_tiles=2", "one for a backward pass", "jaxmoe.KernelPlan(..., backward=plan)"],
    ),
    "more answers to add up at experts than there are numbers": (
        {"plan": SUMS},
        ValueError,
        ["plan has sum_at_experts=True", "524287 tokens per rank x 32 slots", "fewer than 16777216", "Leave it out"],
    ),
    "more to add up than a warp has lanes": (
        {"platform": "gpu", "plan": SUMS, "tokens": 64, "top_k": 25},
        ValueError,
        ["plan has sum_at_experts=True", "8 ranks and top_k=25", "32 of both together", "Leave it out"],
    ),
}


@pytest.mark.usefixtures("both_platforms")
@pytest.mark.parametrize("wrong", WRONG)
def test_what_it_cannot_do_is_said_with_what_is_needed_and_what_to_do(wrong):
    arguments, kind, parts = WRONG[wrong]
    with pytest.raises(kind, match=r"^moe_layer: ") as raised:
        check(**arguments)
    for part in parts:
        assert part in str(raised.value)


def in_8_bits(precision: str | None = None, scale_dtype: Any = jnp.float32, **sizes: int) -> calls.Call:
    """A call of the megakernel with experts in 8 bits, of BF16 tokens and biases, as the checks would let it pass."""
    sizes = {"tokens": 16, "hidden": 256, "intermediate": 384, "num_experts": 2} | sizes
    x, ids, weights, experts, _ = make_inputs(0, **sizes, dtype=jnp.bfloat16, biases=True)  # pyright: ignore
    arguments = Arguments(x, ids, weights, jaxmoe.quantize(experts, scale_dtype=scale_dtype))
    options = CallOptions(axis_name=None, implementation="megakernel", plan=PLAN, precision=precision)
    return calls.check(arguments, options)


@pytest.mark.usefixtures("both_platforms")
def test_on_a_gpu_sums_at_experts_are_not_of_fast_sums():
    of_one = in_8_bits("fp8")
    fast = dataclasses.replace(of_one, accumulation="fast", shape=dataclasses.replace(of_one.shape, ranks=2), plan=SUMS)
    limits.check(fast)
    limits.check(dataclasses.replace(fast, platform="gpu", accumulation="promoted"))
    with pytest.raises(ValueError, match=r"sum_at_experts=True and accumulation='fast'.*Leave one"):
        limits.check(dataclasses.replace(fast, platform="gpu"))


@pytest.mark.usefixtures("both_platforms")
def test_what_it_cannot_do_in_8_bits_is_said_with_what_to_do():
    shape = in_8_bits().shape
    for platform in ("cpu", "gpu"):
        limits.check_megakernel(shape, platform, resolve("silu"), PLAN)
        for sizes in ({"hidden": 192}, {"intermediate": 64}):
            with pytest.raises(ValueError, match=r"on [cg]pu needs multiples of 128 in 8 bits.* implementation='xla'"):
                limits.check_megakernel(dataclasses.replace(shape, **sizes), platform, resolve("silu"), PLAN)
    decoded = in_8_bits("w8a16").shape
    for platform in ("cpu", "gpu"):
        limits.check_megakernel(dataclasses.replace(decoded, hidden=192), platform, resolve("silu"), PLAN)
        with pytest.raises(ValueError, match=r"on [cg]pu needs multiples of 16 in 8 bits.* implementation='xla'"):
            limits.check_megakernel(dataclasses.replace(decoded, hidden=136), platform, resolve("silu"), PLAN)


@pytest.mark.usefixtures("both_platforms")
def test_too_few_slots_of_decoded_weights_are_refused_with_what_is_needed():
    shape = dataclasses.replace(in_8_bits("w8a16").shape, num_experts=8)
    for slots in (0, 3, 4):  # 0 is as many as are needed
        plan = jaxmoe.KernelPlan(1, 2, 8, weight_slots=slots)
        limits.check_megakernel(shape, "gpu", resolve("silu"), plan)
        assert weight_slots(shape, "gpu", plan) == max(slots, 3)
    with pytest.raises(ValueError, match=r"plan has weight_slots=2, .* needs lag_units \+ 1 = 3, or 8, all experts"):
        limits.check_megakernel(shape, "gpu", resolve("silu"), jaxmoe.KernelPlan(1, 2, 8, weight_slots=2))
    backward = jaxmoe.KernelPlan(1, 2, 8, segment_tiles=1, weight_slots=4)
    with pytest.raises(ValueError, match=r"plan.backward has weight_slots=4, .* 2 \* lag_units \+ 1 = 5"):
        limits.check_megakernel(shape, "gpu", resolve("silu"), jaxmoe.KernelPlan(1, 0, 8, backward=backward))
    wide = dataclasses.replace(PLAN, weight_slots=7)
    assert weight_slots(shape.wide, "gpu", wide) == 0


@pytest.mark.usefixtures("both_platforms")
def test_a_gpu_adds_up_answers_at_experts_in_16_bits_and_in_8_of_bfloat16():
    wide = Formats.of(jnp.bfloat16)
    eight_bit = dataclasses.replace(wide, tokens=ROWS, h=ROWS, weights=Format(jnp.float8_e4m3fn, 128, 128))
    of_f16 = dataclasses.replace(Formats.of(jnp.float16), tokens=ROWS, h=ROWS, weights=eight_bit.weights)
    decoded = dataclasses.replace(wide, weights=Format(jnp.float4_e2m1fn, 1, 32, jnp.float8_e8m0fnu))
    for formats, possible in ((wide, True), (eight_bit, True), (of_f16, False), (decoded, False)):
        shape = Shape(64, 256, 256, num_experts=8, top_k=2, ranks=2, formats=formats)
        limits.check_megakernel(shape, "cpu", resolve("silu"), SUMS)
        limits.check_megakernel(dataclasses.replace(shape, ranks=1), "gpu", resolve("silu"), SUMS)
        if possible:
            limits.check_megakernel(shape, "gpu", resolve("silu"), SUMS)
        else:
            with pytest.raises(ValueError, match=r"sum_at_experts=True beside weights in [84] bits.*Leave it out"):
                limits.check_megakernel(shape, "gpu", resolve("silu"), SUMS)


@pytest.mark.parametrize(
    ("platform", "dtype", "hidden", "tokens", "in_registers"),
    [
        ("gpu", jnp.bfloat16, 256, 64, True),
        ("gpu", jnp.bfloat16, 256, 2048, True),
        ("gpu", jnp.bfloat16, 256, 4096, False),  # rows of an expert: then decoding hides behind products
        ("gpu", jnp.float16, 256, 64, False),  # for which there is no kernel
        ("cpu", jnp.float16, 256, 64, True),
        ("gpu", jnp.bfloat16, 224, 64, False),  # no whole number of 64
    ],
)
def test_weights_in_4_bits_are_decoded_in_registers_where_experts_have_few_rows(
    platform, dtype, hidden, tokens, in_registers
):
    weights = Format(jnp.float4_e2m1fn, 1, 32, jnp.float8_e8m0fnu)
    formats = dataclasses.replace(Formats.of(dtype), weights=weights)
    shape = Shape(tokens, hidden, 256, num_experts=8, top_k=2, formats=formats)
    plan = kernel_plan(shape, platform)
    assert (plan.weight_slots == 0) == in_registers
    assert any(reason.startswith(f"weight_slots={plan.weight_slots}: ") for reason in plan.reasons)
    # Chosen by hand it is the same, but where it cannot be, or gate and up are kept for a backward pass.
    by_hand = dataclasses.replace(plan, weight_slots=0)
    possible = in_registers or tokens > 64
    assert (weight_slots(shape, platform, by_hand) == 0) == possible
    assert weight_slots(shape, platform, by_hand, saved_tiles=1) == min(by_hand.fewest_weight_slots, 8)


@pytest.mark.parametrize(
    ("sizes", "wanted", "lag_units"),
    [
        ({"hidden": 7168, "intermediate": 2048, "num_experts": 256, "top_k": 8, "ranks": 8}, 13, 9),
        ({"hidden": 7168, "intermediate": 3072, "num_experts": 384, "top_k": 6, "ranks": 8}, 9, 5),
        ({"hidden": 2880, "intermediate": 2880, "num_experts": 128, "top_k": 4, "ranks": 1}, 9, 9),
    ],
)
def test_decoded_weights_of_a_forward_pass_that_is_kept_take_a_gib_at_most(sizes, wanted, lag_units):
    weights = Format(jnp.float4_e2m1fn, 1, 32, jnp.float8_e8m0fnu)
    shape = Shape(64, **sizes, formats=dataclasses.replace(Formats.of(jnp.bfloat16), weights=weights))
    plan = kernel_plan(shape, "gpu")
    assert (plan.lag_units, plan.weight_slots) == (wanted, 0)
    kept = kept_plan(plan, shape, "gpu")
    assert kept.lag_units == lag_units
    assert kept.fewest_weight_slots < kept.weight_slots <= DECODED_BYTES // shape.wide.expert_bytes
    assert weight_slots(shape, "gpu", kept, saved_tiles=1) == kept.weight_slots
    limits._check_weight_slots("plan", kept, shape, "gpu")
    limits._check_ring("plan", kept, shape, "gpu")
    assert any(reason.startswith(f"lag_units={lag_units}: {wanted} but for") for reason in kept.reasons) == (
        lag_units < wanted
    )
    # One whose weights are decoded ahead is kept as it is.
    ahead = kernel_plan(dataclasses.replace(shape, tokens=64 * 1024), "gpu")
    assert ahead.weight_slots
    assert kept_plan(ahead, shape, "gpu") == ahead


@pytest.mark.parametrize(
    ("tokens", "through", "nvfp4", "slots"),
    [(64, False, False, 0), (64, True, False, 0), (64, True, True, 8), (4096, False, False, 0), (4096, True, False, 8)],
)
def test_beside_rows_in_8_bits_experts_through_e4m3_are_decoded_ahead_where_they_have_many_rows(
    tokens, through, nvfp4, slots
):
    of_matrix, scale = (jnp.float32, jnp.float8_e4m3fn) if nvfp4 else (None, jnp.float8_e8m0fnu)
    weights = Format(jnp.float4_e2m1fn, 1, 16 if nvfp4 else 32, scale, of_matrix, through_e4m3=through)
    formats = dataclasses.replace(Formats.of(jnp.bfloat16), tokens=ROWS, h=ROWS, weights=weights)
    shape = Shape(tokens, 256, 256, num_experts=8, top_k=2, formats=formats)
    for platform in ("gpu", "cpu"):
        plan = kernel_plan(shape, platform)
        assert bool(plan.weight_slots) == bool(slots)
        told = " ".join(plan.reasons)
        assert ("which jaxmoe.through_e4m3 allows" in told) == (tokens > 64 and not through)
        assert weight_slots(shape, platform, plan) == plan.weight_slots
        by_hand = dataclasses.replace(plan, weight_slots=0)
        assert bool(weight_slots(shape, platform, by_hand)) == nvfp4
        if not through:
            with pytest.raises(ValueError, match=r"weight_slots=8: beside tokens in 8 bits.*jaxmoe.through_e4m3"):
                limits.check_megakernel(shape, "cpu", resolve("silu"), KernelPlan(1, 0, 10**6, weight_slots=8))


@pytest.mark.parametrize(
    ("tokens", "nvfp4", "platform", "lag_and_ring"),
    [
        (64, False, "gpu", (24, 64)),
        (64, True, "gpu", (16, 32)),  # decoded ahead
        (64, False, "cpu", (1, 18)),
        (4096, False, "gpu", (9, 43)),  # 512 rows to an expert
    ],
)
def test_where_workers_have_two_short_tasks_in_hand_more_units_lie_between_the_gemms(
    tokens, nvfp4, platform, lag_and_ring
):
    of_matrix, scale = (jnp.float32, jnp.float8_e4m3fn) if nvfp4 else (None, jnp.float8_e8m0fnu)
    weights = Format(jnp.float4_e2m1fn, 1, 16 if nvfp4 else 32, scale, of_matrix, through_e4m3=nvfp4)
    formats = dataclasses.replace(Formats.of(jnp.bfloat16), tokens=ROWS, h=ROWS, weights=weights)
    shape = Shape(tokens, 2048, 768, num_experts=128, top_k=8, ranks=2, formats=formats)
    plan = kernel_plan(shape, platform)
    assert (plan.lag_units, plan.ring_tiles) == lag_and_ring
    assert any(reason.startswith(f"lag_units={plan.lag_units}: ") for reason in plan.reasons)
    wide = kernel_plan(dataclasses.replace(shape, formats=Formats.of(jnp.bfloat16)), "gpu")
    assert tokens > 64 or (wide.lag_units, wide.ring_tiles) == (16, 32)


@pytest.mark.parametrize("nvfp4", [False, True])
def test_a_gpu_decodes_at_most_448_experts_of_a_rank_ahead_beside_rows_in_8_bits(monkeypatch, nvfp4):
    monkeypatch.setattr(limits, "check_platform", lambda *_: None)
    of_matrix, scale = (jnp.float32, jnp.float8_e4m3fn) if nvfp4 else (None, jnp.float8_e8m0fnu)
    weights = Format(jnp.float4_e2m1fn, 1, 16 if nvfp4 else 32, scale, of_matrix, through_e4m3=True)
    formats = dataclasses.replace(Formats.of(jnp.bfloat16), tokens=ROWS, h=ROWS, weights=weights)
    most, more = (Shape(2**18, 256, 256, num_experts=experts, top_k=2, formats=formats) for experts in (448, 512))
    plan = kernel_plan(most, "gpu")
    assert plan.weight_slots
    limits.check_megakernel(most, "gpu", resolve("silu"), plan)
    plan = kernel_plan(more, "gpu")
    assert "has room for 448 experts" in " ".join(plan.reasons)
    told = r"512 experts per rank in 4 bits beside tokens in 8.*decodes those of at most 448"
    if nvfp4:
        with pytest.raises(ValueError, match=told):
            limits.check_megakernel(more, "gpu", resolve("silu"), plan)
    else:
        limits.check_megakernel(more, "gpu", resolve("silu"), plan)
    with pytest.raises(ValueError, match=told):
        limits.check_megakernel(more, "gpu", resolve("silu"), dataclasses.replace(plan, weight_slots=20))


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.float8_e8m0fnu])
def test_experts_in_8_bits_are_operands_of_values_as_they_lie_and_of_float32_scales(scale_dtype):
    call = in_8_bits(scale_dtype=scale_dtype)
    x, ids, weights, experts, _ = make_inputs(
        0, tokens=16, hidden=256, intermediate=384, num_experts=2, dtype=jnp.bfloat16, biases=True
    )
    narrow = jaxmoe.quantize(experts, scale_dtype=scale_dtype)
    for given in (narrow, experts):  # wide ones are rounded in the call
        operands = layer._operands(call, Inputs(x, ids, weights, given))
        named = {name: (array.dtype.name, array.shape) for name, array in operands.items() if name[0] in "wb"}
        assert named == {
            "w_gate": ("float8_e4m3fn", (2, 384, 256)),
            "w_up": ("float8_e4m3fn", (2, 384, 256)),
            "w_down": ("float8_e4m3fn", (2, 256, 384)),
            "w_gate_scales": ("float32", (2, 3, 2)),
            "w_up_scales": ("float32", (2, 3, 2)),
            "w_down_scales": ("float32", (2, 2, 3)),
            "b_gate": ("bfloat16", (2, 384)),
            "b_up": ("bfloat16", (2, 384)),
            "b_down": ("bfloat16", (2, 256)),
        }
        assert operands["x"].dtype == jnp.bfloat16


@pytest.mark.usefixtures("both_platforms")
def test_a_ring_of_all_row_tiles_is_enough_for_any_lag():
    # 4 tokens of 2 slots on 2 ranks are 16 rows: one whole tile of a CPU, and one partly filled for each of 3 experts.
    def check_ring(tiles: int) -> None:
        plan = KernelPlan(unit_tiles=8, lag_units=8, ring_tiles=tiles)
        check(plan=plan, tokens=4, top_k=2, ranks=2, num_experts=6)

    check_ring(4)
    with pytest.raises(ValueError, match="or 4, all row tiles that a rank can have"):
        check_ring(3)


@pytest.mark.usefixtures("both_platforms")
def test_a_backward_plan_may_have_the_least_ring_or_one_of_all_row_tiles():
    def check_ring(tiles: int) -> None:
        backward = KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=tiles, segment_tiles=6)
        check(plan=KernelPlan(1, 1, 2, backward=backward), tokens=400, top_k=2, ranks=2, num_experts=6)

    check_ring(6 + 2 * 1 * 2)
    with pytest.raises(ValueError, match=r"plan\.backward has ring_tiles=9"):
        check_ring(9)
    # 16 rows: one whole tile of a CPU, and one partly filled for each of 3 experts.
    few = KernelPlan(1, 1, 2, backward=KernelPlan(8, 8, 4, segment_tiles=8))
    check(plan=few, tokens=4, top_k=2, ranks=2, num_experts=6)


def test_nothing_is_run_and_nothing_else_chosen_where_the_compiled_part_is_missing(monkeypatch):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named 'jaxmoe.{name}'", name=f"jaxmoe.{name}")

    monkeypatch.setattr(native, "_load", missing)
    with pytest.raises(NotImplementedError, match=r"jaxmoe\._native is missing") as raised:
        call()
    for part in ("'megakernel' is compiled code", "pip install", "Or pass implementation='xla'"):
        assert part in str(raised.value)
    assert call(implementation=None).shape == X.shape


def test_a_build_without_the_kernel_of_a_platform_says_so(monkeypatch):
    monkeypatch.setattr(native, "targets", lambda platform: frozenset({"jaxmoe_device_info"}))
    with pytest.raises(NotImplementedError, match="no forward kernel for platform 'cpu' in this build"):
        call()
    monkeypatch.setattr(machine, "cuda_status", lambda: machine.CudaStatus(available=True, reason=""))
    with pytest.raises(NotImplementedError, match="no forward kernel for platform 'gpu' in this build"):
        check("gpu")


def test_a_gpu_that_cannot_run_it_is_named(monkeypatch):
    monkeypatch.setattr(native, "targets", lambda platform: frozenset())
    monkeypatch.setattr(machine, "cuda_status", lambda: machine.CudaStatus(available=False, reason="It is an A100."))
    with pytest.raises(NotImplementedError, match=r"cannot run on this GPU\. It is an A100\. Or pass implementation"):
        check("gpu")


@pytest.mark.usefixtures("both_platforms")
def test_a_cpu_group_of_several_processes_is_refused_and_one_rank_of_many_processes_is_not(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match=r"2 processes and experts over 8 ranks") as raised:
        call(axis_name="expert", mesh=mesh_of("expert"))
    assert "use_virtual_devices" in str(raised.value)
    check(ranks=1, num_experts=512)


@pytest.mark.usefixtures("both_platforms")
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"plan": jaxmoe.Plan(8)}, ["plan is a Plan", "implementation='megakernel' takes a jaxmoe.KernelPlan"]),
        ({"plan": PLAN, "implementation": "xla"}, ["plan is a KernelPlan", "implementation='xla' takes a jaxmoe.Plan"]),
        ({"plan": PLAN, "implementation": "reference"}, ["plan is a KernelPlan", "takes a jaxmoe.Plan"]),
        ({"plan": PLAN, "implementation": None}, ["Name the implementation", "implementation='megakernel'"]),
        ({"plan": 7}, ["plan is an int", "jaxmoe.KernelPlan"]),
    ],
)
def test_a_plan_of_the_other_kind_is_refused_and_the_right_kind_named(options, parts):
    with pytest.raises(TypeError, match=r"^moe_layer: plan is an? ") as raised:
        call(**options)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"unit_tiles": 0}, "unit_tiles=0"),
        ({"unit_tiles": 2**15}, "unit_tiles=32768"),
        ({"lag_units": -1}, "lag_units=-1"),
        ({"lag_units": 0.5}, "lag_units=0.5"),
        ({"ring_tiles": True}, "ring_tiles=True"),
        ({"ring_tiles": 2**31}, "ring_tiles=2147483648"),
        ({"segment_tiles": -1}, "segment_tiles=-1"),
        ({"segment_tiles": 2**15}, "segment_tiles=32768"),
        ({"segment_tiles": 1.5}, "segment_tiles=1.5"),
    ],
)
def test_a_kernel_plan_that_cannot_be_is_refused(options, name):
    with pytest.raises(ValueError, match=rf"^KernelPlan: {name} must be an integer of"):
        KernelPlan(**{"unit_tiles": 1, "lag_units": 1, "ring_tiles": 2} | options)


@pytest.mark.parametrize("backward", [PLAN, 2, jaxmoe.Plan(8)], ids=["a forward plan", "a number", "a plan of xla"])
def test_a_plan_of_a_backward_pass_needs_segments(backward):
    with pytest.raises(ValueError, match=r"^KernelPlan: backward=.* must be a KernelPlan with segment_tiles, or None"):
        KernelPlan(1, 1, 2, backward=backward)


def test_a_plan_of_a_backward_pass_has_no_backward_pass_of_its_own():
    with pytest.raises(ValueError, match=r"^KernelPlan: one with segment_tiles is for a backward pass"):
        KernelPlan(1, 1, 4, segment_tiles=2, backward=BACKWARD_PLAN)
    assert KernelPlan(1, 1, 2, backward=BACKWARD_PLAN).backward == BACKWARD_PLAN


@pytest.mark.parametrize("name", ["share_columns", "sum_at_experts"])
def test_a_plan_of_a_backward_pass_shares_no_columns_and_makes_no_sums_at_experts(name):
    chosen: dict[str, Any] = {name: True}
    with pytest.raises(ValueError, match=rf"^KernelPlan: {name}=True is for a forward pass"):
        KernelPlan(1, 1, 4, segment_tiles=2, **chosen)
    assert getattr(KernelPlan(1, 1, 2, **chosen, backward=BACKWARD_PLAN), name)


@pytest.mark.parametrize("plan", [PLAN, KernelPlan(3, 2, 99), BACKWARD_PLAN, KernelPlan(3, 2, 99, segment_tiles=5)])
def test_a_plan_and_the_compiled_schedule_agree_on_the_least_ring(plan):
    schedule = native.schedule().Schedule(
        native.schedule().TileSizes(16, 32, 64),
        plan.unit_tiles,
        plan.lag_units,
        plan.ring_tiles,
        workers=1,
        chunk_rows=1,
        dispatchers=1,
        narrow_rows=0,
        keep_tokens=0,
        segment_tiles=plan.segment_tiles,
    )
    assert plan.fewest_ring_tiles == schedule.min_ring_tiles


def test_the_kinds_of_activations_are_numbered_as_in_compiled_code():
    numbers = [compiled_form(activation) for activation in ACTIVATIONS.values()]
    assert [form.kind for form in numbers if form] == [0, 1, 2, 3]
    assert compiled_form(jaxmoe.SwiGLU(limit=7.0, alpha=1.702, up_offset=1.0)) == (4, 7.0, 1.702, 1.0)
    assert compiled_form(jaxmoe.SwiGLU()) == (4, float("inf"), 1.0, 0.0)
