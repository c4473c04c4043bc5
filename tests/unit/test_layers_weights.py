"""`jaxmoe.nnx.MoE.from_weights`: layers of checkpoints, wide and in few bits, on one device and on meshes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import RouterConfig
from jaxmoe.convert import MoEWeights, from_hf
from jaxmoe.nnx import MoE, QuantizedWeight
from jaxmoe.testing import relative_error
from tests.unit.checkpoints import CASES, HIDDEN, LAYER, TOKENS, VOCABULARY
from tests.unit.flax_layers import make_mesh

ROUTER = RouterConfig.mixtral()


def weights_of(block: str | None = None, **arguments: Any) -> MoEWeights:
    """Returns weights of 8 experts, quantised where `block` says to what, with all that a layer may have besides.

    `"given scales"` are blocks of 128 x 128 with scales of tokens and h beside them.
    """
    keys = jax.random.split(jax.random.key(0), 6)
    experts = jaxmoe.Experts.init(keys[0], 8, 32, 64, biases=True)
    experts = dataclasses.replace(experts, b_down=jax.random.normal(keys[1], (8, 32)))
    if block == "given scales":
        experts = jaxmoe.with_input_scales(jaxmoe.quantize(experts), 5 / 448, 9 / 448)
    elif block is not None:
        experts = jaxmoe.quantize(experts, block)
    given: dict[str, Any] = {
        "experts": experts,
        "router_kernel": jax.random.normal(keys[2], (32, 8)),
        "router_bias": jax.random.normal(keys[3], (8,)),
        "selection_bias": 0.3 * jax.random.normal(keys[4], (8,)),
        "shared": jaxmoe.Experts.init(keys[5], 1, 32, 16, biases=True),
    }
    return MoEWeights(**given | arguments)


def tokens() -> jax.Array:
    return jax.random.normal(jax.random.key(9), (8, 4, 32))


@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen3_moe in NVFP4", "qwen3_next", "kimi_k2 in FP8", "deepseek_v3", "gpt_oss", "deepseek_v4"],
)
def test_a_layer_of_a_checkpoint_computes_what_its_numbers_say(name):
    case = CASES[name]()
    weights = from_hf(case.tensors, case.family, LAYER, dtype=jnp.float32)
    precision: Any = "w8a16" if isinstance(weights.experts.w_gate, jaxmoe.BlockScaled) else None
    moe = MoE.from_weights(
        weights, case.router, activation=case.activation, axis_name=None, precision=precision, dtype=jnp.float32
    )
    rng = np.random.default_rng(99)
    x, token_ids = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32), rng.integers(0, VOCABULARY, TOKENS)
    y, aux = nnx.jit(lambda moe, x: moe(x))(moe, x)
    assert relative_error(y, case.compute(np.asarray(x, np.float64), token_ids)) < 5e-6
    assert int(aux.stats.rows_per_expert.sum()) == TOKENS * case.router.top_k


@pytest.mark.slow
def test_wide_weights_are_the_parameters_and_are_not_copied():
    weights = weights_of()
    moe = MoE.from_weights(weights, ROUTER, axis_name=None)
    assert (
        moe.config
        == MoE(
            32,
            64,
            8,
            ROUTER,
            biases=True,
            router_bias=True,
            selection_bias=True,
            shared_intermediate=16,
            axis_name=None,
            rngs=nnx.Rngs(0),
        ).config
    )
    assert set(nnx.state(moe, nnx.Param)) == {
        *("router_kernel", "router_bias"),
        *(f"{part}_{name}" for part in ("w", "b", "shared_w", "shared_b") for name in ("gate", "up", "down")),
    }
    assert not nnx.state(moe, QuantizedWeight)
    assert moe.w_gate.get_value().unsafe_buffer_pointer() == weights.experts.w_gate.unsafe_buffer_pointer()
    assert moe.selection_bias is not None
    np.testing.assert_array_equal(moe.selection_bias[...], weights.selection_bias)
    made_under_jit = nnx.jit(lambda weights: MoE.from_weights(weights, ROUTER, axis_name=None))(weights)
    np.testing.assert_array_equal(made_under_jit.w_gate[...], weights.experts.w_gate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "axis_type"),
    [
        (None, AxisType.Auto),
        ("128x128", AxisType.Auto),
        ("given scales", AxisType.Auto),
        ("given scales", AxisType.Explicit),
        ("mxfp4", AxisType.Explicit),
        ("nvfp4", AxisType.Auto),
    ],
)
def test_on_a_mesh_experts_are_split_and_compute_what_they_do_on_one_device(block, axis_type):
    x, weights = tokens(), weights_of(block)
    call = nnx.jit(lambda moe, x: moe(x)[0])
    expected = call(MoE.from_weights(weights, ROUTER, axis_name=None), x)
    mesh = make_mesh(axis_type)
    spec = P("data") if axis_type == AxisType.Explicit else P(("data", "expert"))
    with jax.set_mesh(mesh):
        moe = MoE.from_weights(weights, ROUTER, data_axes="data")
        y = call(moe, jax.device_put(x, NamedSharding(mesh, spec)))
    leaves = jax.tree.leaves(moe.w_gate.get_value())
    assert len(leaves) == {None: 1, "nvfp4": 3, "given scales": 3}.get(block, 2)
    assert all(leaf.sharding.shard_shape(leaf.shape)[0] == 2 for leaf in leaves)
    # Rows of 8 bits may be rounded to the neighbouring value where sums are in another order.
    assert relative_error(y, expected) < (1e-3 if block in ("128x128", "given scales") else 1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("block", ["128x128", "given scales", "mxfp4", "nvfp4"])
def test_on_a_mesh_an_abstract_layer_has_the_arrays_of_the_real_one(block, axis_type):
    weights = weights_of(block)
    with jax.set_mesh(make_mesh(axis_type)):
        moe = MoE.from_weights(weights, ROUTER, data_axes="data")
        abstract = nnx.eval_shape(lambda: MoE.from_weights(weights, ROUTER, data_axes="data"))
        assert "weights " in str(abstract.explain(jax.ShapeDtypeStruct((8, moe.config.hidden), jnp.bfloat16)))
    found, wanted = nnx.state(abstract), nnx.state(moe)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), found, wanted)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_over_further_axes_quantised_experts_stay_split_as_they_came_and_wide_ones_are_split():
    case = CASES["deepseek_v3 in FP8"]()
    mesh = make_mesh(AxisType.Auto)
    axes: dict[str, Any] = {"axis_name": "expert", "hidden_axis": "data"}
    with jax.set_mesh(mesh):
        narrow = from_hf(case.tensors, case.family, LAYER, axis_name="expert", hidden_axis="data")
        wide = dataclasses.replace(narrow, experts=jaxmoe.dequantize(narrow.experts))
        moes = [MoE.from_weights(weights, case.router, **axes) for weights in (narrow, wide)]
    assert moes[0].w_gate.get_value() == narrow.experts.w_gate
    in_8_bits: Any = moes[0].w_gate.get_value()
    for array in (in_8_bits.values.swapaxes(1, 2), moes[1].w_gate.get_value()):
        assert array.sharding.shard_shape(array.shape) == (2, HIDDEN // 2, array.shape[2])


@pytest.mark.slow
def test_inside_shard_map_the_split_of_quantised_experts_is_that_of_the_state():
    x, weights = tokens(), weights_of("mxfp4")
    expected, _ = MoE.from_weights(weights, ROUTER, axis_name=None)(x)
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        graph, state = nnx.split(MoE.from_weights(weights, ROUTER, data_axes="data"))
        specs = nnx.get_partition_spec(state)
        on_rank = jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x)[0],
            in_specs=(specs, P(("data", "expert"))),
            out_specs=P(("data", "expert")),
        )
        assert relative_error(jax.jit(on_rank)(state, x), expected) < 1e-5


@pytest.mark.slow
def test_beside_quantised_experts_everything_else_is_trained():
    moe = MoE.from_weights(weights_of("nvfp4"), ROUTER, axis_name=None)
    assert set(nnx.state(moe, QuantizedWeight)) == {"w_gate", "w_up", "w_down"}
    optimizer = nnx.Optimizer(moe, optax.sgd(0.1), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(moe))

    @nnx.jit
    def step(moe: Any, optimizer: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda moe: jnp.mean(moe(x)[0] ** 2))(moe)
        optimizer.update(moe, gradients)
        return loss

    losses = [float(step(moe, optimizer, tokens())) for _ in range(5)]
    assert losses[-1] < losses[0]
    after = nnx.state(moe)
    for name in ("w_gate", "w_up", "w_down"):
        for old, new in zip(jax.tree.leaves(before[name]), jax.tree.leaves(after[name]), strict=True):
            assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
    assert not np.array_equal(before["router_kernel"][...], after["router_kernel"][...])
    assert not np.array_equal(before["shared_w_up"][...], after["shared_w_up"][...])


@pytest.mark.slow
def test_layers_of_equal_weights_have_equal_graphs_and_any_of_them_takes_the_state_of_another():
    layers = [MoE.from_weights(weights_of("mxfp4"), ROUTER, axis_name=None) for _ in range(2)]
    (graph, state), (other, _) = (nnx.split(layer) for layer in layers)
    assert (graph, hash(graph)) == (other, hash(other))
    np.testing.assert_array_equal(nnx.merge(other, state)(tokens())[0], layers[0](tokens())[0])


def test_the_dtype_is_that_of_tokens_and_wide_weights_or_the_one_asked_for():
    weights = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights_of())
    weights = dataclasses.replace(weights, experts=jaxmoe.quantize(weights.experts, "mxfp4"))
    x = tokens().astype(jnp.bfloat16)
    assert MoE.from_weights(weights, ROUTER, axis_name=None)(x)[0].dtype == jnp.bfloat16
    assert MoE.from_weights(weights, ROUTER, axis_name=None)(tokens())[0].dtype == jnp.float32
    assert MoE.from_weights(weights, ROUTER, axis_name=None, dtype=jnp.bfloat16)(tokens())[0].dtype == jnp.bfloat16


def test_without_an_up_projection_the_layer_has_none():
    weights = MoEWeights(jaxmoe.Experts.init(jax.random.key(0), 4, 32, 64, gated=False), jnp.ones((32, 4)))
    moe = MoE.from_weights(weights, ROUTER, activation="relu", axis_name=None)
    assert moe.w_up is None
    assert moe(tokens())[0].shape == tokens().shape


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            lambda: {"token_table": jnp.zeros((9, 2), int)},
            NotImplementedError,
            r"token_table .* topk_ids=weights.token_table\[",
        ),
        (
            lambda: {"shared_gate": jnp.zeros((32, 1)), "shared": None},
            ValueError,
            "shared_gate .*, and weights.shared is None",
        ),
        (
            lambda: {"shared_gate": jnp.zeros(32)},
            ValueError,
            r"shared_gate_kernel has shape \(32,\); it must be \(32, 1\)",
        ),
        (
            lambda: {"router_kernel": jnp.zeros((8, 32))},
            ValueError,
            r"router_kernel has shape \(8, 32\); it must be \(32, 8\)",
        ),
        (
            lambda: {"shared": jaxmoe.Experts.init(jax.random.key(0), 1, 32, 16)},
            ValueError,
            "shared_b_down, shared_b_gate, shared_b_up cannot be there, or missing",
        ),
        (
            lambda: {"shared": jaxmoe.Experts.init(jax.random.key(0), 2, 32, 16, biases=True)},
            ValueError,
            "weights.shared has 2 experts; it must have one.*join w_gate and w_up along intermediate",
        ),
        (
            lambda: {"shared": jaxmoe.Experts.init(jax.random.key(0), 1, 64, 16, biases=True)},
            ValueError,
            "weights.shared has hidden=64; it must be 32, that of weights.experts",
        ),
        (
            lambda: {"shared": jax.tree.map(lambda a: a[0], weights_of().shared)},
            ValueError,
            r"weights.shared.w_gate has shape \(32, 16\); it must be \[experts, hidden, .*array\[None\]",
        ),
        (
            lambda: {"experts": jax.tree.map(lambda a: a[0], weights_of("mxfp4").experts)},
            ValueError,
            r"weights.experts.w_gate: MXFP4: uint8 values \(64, 16\) and scales .* do not go together",
        ),
        (lambda: {"shared": {}}, TypeError, r"weights.shared: experts is a dict; pass jaxmoe.Experts"),
        (
            lambda: {"selection_bias": jnp.zeros(7)},
            ValueError,
            r"selection_bias has shape \(7,\); it must be \(8,\) to go with w_gate",
        ),
        (lambda: {"experts": weights_of().shared, "shared": None}, ValueError, r"router_kernel .* must be \(32, 1\)"),
    ],
)
def test_weights_that_do_not_make_a_layer_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        MoE.from_weights(weights_of(**changes()), RouterConfig(top_k=1), axis_name=None)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_a_shared_expert_with_gate_and_up_in_one_array_makes_the_layer_of_one_with_two(layout):
    weights: Any = weights_of()
    fused = dataclasses.replace(weights, shared=weights.shared.fuse(layout))
    found, wanted = (nnx.state(MoE.from_weights(each, ROUTER, axis_name=None)) for each in (fused, weights))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_weights_without_the_selection_bias_of_their_router_are_warned_of():
    router = RouterConfig.kimi_k2(top_k=2)
    MoE.from_weights(weights_of(), router, axis_name=None)
    with pytest.warns(
        UserWarning, match=r"from_weights: .* selection_bias is the checkpoint's e_score_correction_bias"
    ):
        MoE.from_weights(weights_of(selection_bias=None), router, axis_name=None)


def test_a_layer_of_a_checkpoint_makes_its_sums_as_it_is_told():
    given: dict[str, Any] = {"axis_name": None, "accumulation": "fast"}
    fast = MoE.from_weights(weights_of("given scales"), ROUTER, **given)
    assert fast.config.accumulation == "fast"
    promoted = MoE.from_weights(weights_of("given scales"), ROUTER, axis_name=None)
    # Without tensor cores they are the same.
    np.testing.assert_array_equal(fast(tokens())[0], promoted(tokens())[0])
    with pytest.raises(ValueError, match="accumulation='fast' scales the sum of all products"):
        MoE.from_weights(weights_of("mxfp4"), ROUTER, **given)


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_is_no_weights_and_a_precision_that_does_not_fit_them_are_refused():
    with pytest.raises(TypeError, match=r"weights is an Experts; pass what jaxmoe.convert.from_hf returned"):
        MoE.from_weights(weights_of().experts, ROUTER, axis_name=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="precision='w8a16' decodes experts in 8 bits"):
        MoE.from_weights(weights_of("mxfp4"), ROUTER, axis_name=None, precision="w8a16")
