"""The fused kernel on GPUs, beyond the suite: real sizes, the same bits for every plan and timing, its place in XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import machine
from jaxmoe.bench.kernels import kernel_times
from jaxmoe.options import Arguments
from jaxmoe.testing import dense, make_inputs, relative_error, tolerance
from tests.layer_calls import both_of, gradients_of, layer, mesh_of, widened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]

# Several row tiles of an expert, narrow ones, widths that fill no tile.
SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"tokens": 1500, "hidden": 2880, "intermediate": 2880, "num_experts": 8, "top_k": 4},
    "many experts": {"tokens": 2048, "hidden": 512, "intermediate": 768, "num_experts": 64, "top_k": 8},
    "few rows": {"tokens": 8, "hidden": 1024, "intermediate": 520, "num_experts": 16, "top_k": 2},
    "odd numbers of columns": {"tokens": 777 * 4, "hidden": 712, "intermediate": 1160, "num_experts": 16, "top_k": 3},
}
# As Qwen3-Next has on one GPU, and DeepSeek-V4-Pro on two.
MANY_EXPERTS = {"one rank": 512, "data x expert, groups of two": 384}
PLANS = (
    None,
    jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1),
    jaxmoe.KernelPlan(unit_tiles=3, lag_units=2, ring_tiles=9),
    jaxmoe.KernelPlan(unit_tiles=32, lag_units=1, ring_tiles=10_000),
    jaxmoe.KernelPlan(unit_tiles=2, lag_units=2, ring_tiles=40, share_columns=True),
)


@functools.cache
def jitted(**options: Any) -> Any:
    return jax.jit(layer("all devices", implementation="megakernel", **options))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot", "unused-slots"])
@pytest.mark.parametrize("size", SIZES)
def test_real_sizes_cost_at_most_twice_the_error_of_the_same_maths(size, routing, dtype):
    arguments = make_inputs(1, **SIZES[size], routing=routing, biases=True, token_valid=True, dtype=dtype)
    truth, rough = dense(widened(arguments)), dense(arguments, compute_dtype=dtype)
    y = jitted()(arguments)
    assert relative_error(y, truth) <= tolerance(rough, truth, dtype)


@pytest.mark.parametrize("size", SIZES)
def test_every_plan_gives_the_same_bits(size):
    arguments = make_inputs(2, **SIZES[size], routing="zipf", dtype=jnp.bfloat16)
    expected = np.asarray(jitted()(arguments))
    for plan in PLANS:
        np.testing.assert_array_equal(np.asarray(jitted(plan=plan)(arguments)), expected)


def test_a_thousand_layers_back_to_back_give_the_bits_of_a_thousand_calls():
    arguments = make_inputs(3, tokens=512, hidden=256, intermediate=384, num_experts=16, top_k=2, dtype=jnp.bfloat16)
    mesh, tokens = mesh_of("expert"), P("expert")

    def one(x, ids, weights, experts):
        y = jaxmoe.moe_layer(x, ids, weights, experts, implementation="megakernel")
        # In float32, so that XLA rounds once in both programs; bounded, so that a thousand layers stay finite.
        return jnp.clip(x.astype(jnp.float32) / 2 + y.astype(jnp.float32), -2, 2).astype(x.dtype)

    def over(function: Any) -> Any:
        specs = (tokens, tokens, tokens, tokens)
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=tokens))

    def scanned(x, ids, weights, experts):
        return jax.lax.scan(lambda c, _: (one(c, ids, weights, experts), None), x, None, length=1000)[0]

    _, ids, weights, experts, _ = arguments
    step, x = over(one), arguments.x
    for _ in range(1000):
        x = step(x, ids, weights, experts)
    scanned_x = np.asarray(over(scanned)(arguments.x, ids, weights, experts))
    assert np.isfinite(scanned_x.astype(np.float32)).all()
    assert scanned_x.tobytes() == np.asarray(x).tobytes()


# More tokens than a launch has warps, so that most are added up while experts are still multiplied; more than its
# blocks have bits for, so that two or three share one; and so few experts that hardly any can be early.
EARLY_SUMS: dict[str, dict[str, Any]] = {
    "many experts": {"tokens": 4096, "hidden": 512, "intermediate": 256, "num_experts": 128, "top_k": 8},
    "several tokens a bit": {"tokens": 160_000, "hidden": 64, "intermediate": 64, "num_experts": 64, "top_k": 2},
    "few experts": {"tokens": 3000, "hidden": 256, "intermediate": 128, "num_experts": 8, "top_k": 1},
}


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot", "unused-slots"])
@pytest.mark.parametrize("size", EARLY_SUMS)
def test_tokens_that_are_added_up_before_the_last_expert_are_right_and_the_same_in_every_call(size, routing):
    given = make_inputs(7, **EARLY_SUMS[size], routing=routing, dtype=jnp.bfloat16)
    # In both passes: gradients of tokens are sums over slots as well.
    function = both_of(layer("all devices", implementation="megakernel"))
    expected = function(given)
    truth, rough = dense(widened(given)), dense(given, compute_dtype=jnp.bfloat16)
    assert relative_error(expected[0], truth) <= tolerance(rough, truth, jnp.bfloat16)

    @jax.jit
    def differences(results: Any, expected: Any) -> jax.Array:
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        return sum((jnp.sum(got != want) for got, want in pairs), start=jnp.zeros((), jnp.int32))

    for _ in range(300):
        assert int(differences(function(given), expected)) == 0


def test_shapes_may_change_from_call_to_call():
    """A larger shape gets a larger arena; the smaller one before it finds its place in that."""
    first = None
    for tokens in (64, 4096, 64, 8192, 64):
        arguments = make_inputs(
            4, tokens=tokens, hidden=256, intermediate=256, num_experts=8, top_k=2, dtype=jnp.bfloat16
        )
        y = np.asarray(jitted()(arguments))
        assert relative_error(y, dense(widened(arguments))) < 1e-2
        if tokens == 64:
            first = y if first is None else first
            np.testing.assert_array_equal(y, first)


@pytest.mark.timeout(300)
def test_a_hundred_thousand_calls_of_alternating_shapes_give_the_same_bits():
    """Forward and backward passes of four shapes, none of them waited for."""
    sizes: list[dict[str, Any]] = [
        {"tokens": 16, "hidden": 256, "intermediate": 256, "num_experts": 64, "top_k": 8},
        {"tokens": 1024, "hidden": 512, "intermediate": 128, "num_experts": 8, "top_k": 2},
        {"tokens": 240, "hidden": 128, "intermediate": 384, "num_experts": 16, "top_k": 4},
        {"tokens": 64, "hidden": 256, "intermediate": 64, "num_experts": 32, "top_k": 1},
    ]
    placed = jax.NamedSharding(mesh_of("expert"), P("expert"))

    def program(number: int, passes: Any) -> Any:
        arguments = make_inputs(number, **sizes[number], routing="zipf", dtype=jnp.bfloat16)
        arguments = jax.device_put(arguments, placed)
        expected = jax.jit(passes)(arguments)

        def differences(wrong: jax.Array, arguments: Arguments, expected: Any) -> jax.Array:
            """Counts elements by themselves on each device: no sum over devices holds them together."""
            pairs = zip(jax.tree.leaves(passes(arguments)), jax.tree.leaves(expected), strict=True)
            return sum((jnp.sum((got != want).reshape(len(wrong), -1), 1) for got, want in pairs), start=wrong)

        call = jax.jit(differences)
        return lambda wrong: call(wrong, arguments, expected)

    forward = layer("all devices", implementation="megakernel")
    programs = [program(number, forward) for number in range(4)]
    programs += [program(number, gradients_of(forward)) for number in (1, 2)]
    wrong = jax.device_put(jnp.zeros(jax.device_count(), jnp.int32), placed)
    for number in range(100_000):
        # 5 is prime to 6, and the other stride lets a shape come twice in turn.
        wrong = programs[(number * 5 + number // 1000) % len(programs)](wrong)
        if number % 100 == 0:
            jax.block_until_ready(wrong)
    assert int(wrong.sum()) == 0
    jaxmoe.raise_if_failed()


@pytest.mark.skipif(jax.device_count() < 2, reason="one device has no order")
@pytest.mark.parametrize("axes", [("expert",), ("expert", "data"), ("data", "expert")], ids=" x ".join)
def test_the_order_of_devices_in_the_mesh_does_not_matter(axes):
    """The kernel asks XLA's communicator for its rank; which experts it is given follows from the mesh."""
    devices = np.array(jax.devices())[::-1]
    if len(axes) == 2 and len(devices) < 4:
        pytest.skip("two groups of two ranks need four GPUs")
    shape = {"expert": 2, "data": len(devices) // 2} if len(axes) == 2 else {"expert": len(devices)}
    mesh = Mesh(devices.reshape([shape[axis] for axis in axes]), axes)
    arguments = make_inputs(10, **SIZES["many experts"], routing="zipf", biases=True, dtype=jnp.bfloat16)

    def run(arguments: Arguments) -> jax.Array:
        data_axes = tuple(set(axes) - {"expert"})
        return jaxmoe.moe_layer(*arguments[:4], implementation="megakernel", mesh=mesh, data_axes=data_axes)

    for compiled in (jax.jit, gradients_of):
        found, truth = compiled(run)(arguments), compiled(dense)(widened(arguments))
        rough = compiled(functools.partial(dense, compute_dtype=jnp.bfloat16))(arguments)
        for got, want, low in zip(*map(jax.tree.leaves, (found, truth, rough)), strict=True):
            assert relative_error(got, want) <= tolerance(low, want, jnp.bfloat16)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_ranks_keep_their_experts_wherever_the_mesh_has_their_gpus():
    arguments = make_inputs(5, tokens=512, hidden=256, intermediate=256, num_experts=8, top_k=2, dtype=jnp.bfloat16)
    truth = dense(widened(arguments))
    for devices in (jax.devices(), jax.devices()[::-1], jax.devices()):
        mesh = jax.sharding.Mesh(np.array(devices), ("expert",))
        run = jax.jit(lambda a, mesh=mesh: jaxmoe.moe_layer(*a[:4], mesh=mesh, implementation="megakernel"))
        assert relative_error(np.asarray(run(arguments)), truth) < 1e-2
        jaxmoe.raise_if_failed()


def test_what_was_compiled_may_be_forgotten():
    arguments = make_inputs(6, tokens=512, hidden=256, intermediate=256, num_experts=8, top_k=2, dtype=jnp.bfloat16)
    expected = np.asarray(jitted()(arguments))
    jax.clear_caches()
    np.testing.assert_array_equal(np.asarray(jitted()(arguments)), expected)


@pytest.mark.parametrize(
    "size",
    [
        {"tokens": 65_536 * jax.device_count(), "hidden": 256, "intermediate": 128, "num_experts": 16, "top_k": 2},
        {
            "tokens": 512,
            "hidden": 256,
            "intermediate": 128,
            "num_experts": 512 * jax.device_count(),
            "top_k": 32,
        },
    ],
    ids=["65,536 tokens of each rank", "512 experts of each rank, 32 slots of each token"],
)
def test_sizes_go_up_to_the_limits(size):
    arguments = make_inputs(7, **size, dtype=jnp.bfloat16)
    truth, rough = dense(widened(arguments)), dense(arguments, compute_dtype=jnp.bfloat16)
    assert relative_error(jitted()(arguments), truth) <= tolerance(rough, truth, jnp.bfloat16)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot", "unused-slots"])
@pytest.mark.parametrize("tokens", [8, 2048])
@pytest.mark.parametrize("placement", MANY_EXPERTS)
def test_hundreds_of_experts_of_a_rank_cost_at_most_twice_the_error_of_the_same_maths(placement, tokens, routing):
    sizes = {"tokens": tokens, "hidden": 256, "intermediate": 136, "num_experts": MANY_EXPERTS[placement], "top_k": 10}
    arguments = make_inputs(10, **sizes, routing=routing, biases=True, dtype=jnp.bfloat16)
    truth, rough = dense(widened(arguments)), dense(arguments, compute_dtype=jnp.bfloat16)
    y = jax.jit(layer(placement, implementation="megakernel"))(arguments)
    assert relative_error(y, truth) <= tolerance(rough, truth, jnp.bfloat16)


def test_too_little_memory_is_an_error_that_says_what_to_change_and_the_next_call_runs():
    arguments = make_inputs(8, tokens=64, hidden=256, intermediate=256, num_experts=8, top_k=2, dtype=jnp.bfloat16)
    first = np.asarray(jitted()(arguments))
    # A ring for the worst routing: 2^23 rows and h of 15 KiB each, on every rank.
    tokens, hidden, slots, ranks = 2**18, 7168, 32, jax.device_count()
    shapes = Arguments(
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, slots), jnp.int32),
        jax.ShapeDtypeStruct((tokens, slots), jnp.float32),
        jax.eval_shape(lambda: jaxmoe.Experts.init(jax.random.key(0), 32 * ranks, hidden, 512, dtype=jnp.bfloat16)),
        None,
    )
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(jitted(plan=jaxmoe.KernelPlan(ring_tiles=2**20, unit_tiles=4, lag_units=1))(zeros))
    for part in ("outside of XLA's pool", "XLA_PYTHON_CLIENT_MEM_FRACTION", "ring_tiles"):
        assert part in str(error.value)
    np.testing.assert_array_equal(np.asarray(jitted()(arguments)), first)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device has no collectives")
def test_the_call_is_on_the_stream_of_the_program_so_that_collectives_run_beside_it():
    arguments = make_inputs(5, tokens=64, hidden=64, intermediate=64, num_experts=8, top_k=2, dtype=jnp.bfloat16)
    text = jitted().lower(arguments).compile().as_text()
    lines = [line for line in text.splitlines() if "jaxmoe_forward" in line]
    assert lines
    assert "_xla_stream_annotation" not in text


def test_a_layer_is_one_kernel_and_what_xla_adds_is_short():
    sizes: dict[str, Any] = {"tokens": 4096, "hidden": 2048, "intermediate": 1024, "num_experts": 16, "top_k": 2}
    arguments = make_inputs(9, **sizes, dtype=jnp.bfloat16)
    # Where the layer wants them, so that nothing is moved before it starts.
    placed = jax.device_put(arguments, jax.NamedSharding(mesh_of("expert"), P("expert")))
    jax.block_until_ready(jitted()(placed))
    times = kernel_times(lambda: jitted()(placed))
    ours = [(each.microseconds, each.launches) for each in times if "moe_forward" in each.name]
    [(microseconds, launches)] = ours
    assert launches == 1
    assert not [each.name for each in times if "nccl" in each.name.lower()]
    # Masks of ids and weights, 8 bytes a slot. No copy of tokens or weights is that fast.
    assert sum(each.microseconds for each in times if "moe_forward" not in each.name) < max(microseconds / 10, 20)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device has no collectives")
def test_it_runs_beside_independent_collectives():
    arguments = make_inputs(6, tokens=2048, hidden=512, intermediate=512, num_experts=8, top_k=2, dtype=jnp.bfloat16)
    mesh, tokens = mesh_of("expert"), P("expert")

    def mixed(x, ids, weights, experts):
        total = jax.lax.psum(x * 2, "expert")
        y = jaxmoe.moe_layer(x, ids, weights, experts, implementation="megakernel")
        everything = jax.lax.all_gather(x * 3, "expert")
        z = jaxmoe.moe_layer(y, ids, weights, experts, implementation="megakernel")
        return z + (total + everything.sum(0)).astype(z.dtype)

    run = jax.jit(jax.shard_map(mixed, mesh=mesh, in_specs=(tokens,) * 4, out_specs=tokens))
    y = run(*arguments[:4])
    expected = np.asarray(y)
    for _ in range(300):
        y = run(*arguments[:4])
    np.testing.assert_array_equal(np.asarray(y), expected)
