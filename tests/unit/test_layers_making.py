"""How Flax layers are made: first weights, variables, and what arguments, inputs and a missing library are told."""

import contextlib
import functools
import importlib.util
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
import jaxmoe.linen
import jaxmoe.nnx
from jaxmoe import RouterConfig, SwiGLU, sharding
from jaxmoe.implementations.megakernel import limits
from tests.unit.blocks_by_hand import BLOCKS, EXPERTS, HIDDEN, INTERMEDIATE, fill
from tests.unit.flax_layers import LinenLayer, NNXLayer, make_mesh


def traced(moe: Any, x: jax.Array) -> Any:
    """Returns what a layer explains to code that is being compiled."""
    told = []
    jax.eval_shape(jax.jit(lambda x: told.append(moe.explain(x))), x)
    return told[0]


class Behaviours:
    """How a layer of either library is made."""

    layer: Any

    def test_every_expert_draws_its_own_weights_of_variance_one_over_fan_in(self):
        arguments = {"intermediate": 64, "num_experts": 32, "shared_intermediate": 256, "biases": True, "gated": False}
        parameters = self.layer().initial(**arguments)
        for name, array in parameters.items():
            if array.ndim >= 2 and "b_" not in name:
                assert abs(np.std(array) * array.shape[-2] ** 0.5 - 1) < 0.06, name
            else:
                np.testing.assert_array_equal(array, 0)
        assert np.unique(np.asarray(parameters["w_gate"][:, 0, 0])).size == 32
        assert set(self.layer().names(**arguments).values()) == {None}  # without mesh axes no sharding metadata

    @pytest.mark.usefixtures("unchecked_shapes")
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"hidden": 0}, ValueError, "MoE: hidden=0 must be an integer of at least 1"),
            ({"num_experts": 8.0}, TypeError, r"MoE: num_experts=8\.0 must be an integer"),
            ({"shared_intermediate": -1}, ValueError, "MoE: shared_intermediate=-1 must be"),
            ({"router": 2}, TypeError, r"MoE: router is an int; pass jaxmoe.RouterConfig\(top_k=...\)"),
            ({"router": RouterConfig(top_k=9)}, ValueError, "MoE: router.top_k=9 exceeds num_experts=8"),
            ({"dtype": jnp.int8}, TypeError, "MoE: dtype=int8 must be a float dtype, such as bfloat16"),
            ({"router": RouterConfig(top_k=1, num_groups=3)}, ValueError, "num_experts=8 cannot be split"),
            ({"activation": "swish"}, ValueError, "activation='swish' is not known. Use one of 'silu'"),
            ({"shared_activation": "silu"}, ValueError, "there is no shared expert. Set shared_intermediate="),
            (
                {"shared_gate": True},
                ValueError,
                "there is no shared expert for it to multiply. Set shared_intermediate=",
            ),
            ({"activation": SwiGLU(), "gated": False}, ValueError, "gated=False: it takes two projections, and there"),
            ({"implementation": "cuda"}, ValueError, "implementation='cuda' is not known"),
            ({"precision": "w8a16"}, ValueError, "precision='w8a16' decodes experts in 8 bits, and .* is float32"),
            ({"axis_name": "expert", "num_experts": 6}, ValueError, "num_experts=6 cannot be spread over the 4 ranks"),
            ({"axis_name": "ep"}, ValueError, "axis 'ep' is not in the mesh"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused_before_parameters_exist(self, arguments, error, message):
        with jax.set_mesh(make_mesh(AxisType.Auto)), pytest.raises(error, match=message):
            self.layer().shapes(**arguments)

    @pytest.mark.parametrize(
        ("kind", "tokens_per_rank", "ranks"), [(None, 32, 1), (AxisType.Auto, 4, 4), (AxisType.Explicit, 4, 4)]
    )
    @pytest.mark.parametrize("given", ["shape", "array", "traced"])
    def test_explain_says_what_jaxmoe_says_of_the_call_in_the_layer_and_computes_nothing(
        self, kind, tokens_per_rank, ranks, given
    ):
        where: dict[str, Any] = {} if kind is None else {"axis_name": "expert"}
        mesh = None if kind is None else make_mesh(kind)
        arguments = {"dtype": jnp.bfloat16, "residuals": "recompute", "activation": "relu", **where}
        # The type of x says that its tokens are split over "data" too; of Auto axes JAX knows nothing inside of jit.
        unknown = kind == AxisType.Auto and given == "traced"
        sharding = None if mesh is None else NamedSharding(mesh, P("data"))
        x = jax.ShapeDtypeStruct((8, 4, HIDDEN), jnp.float32, sharding=sharding)
        tokens = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=None if unknown else sharding)
        slots = [jax.ShapeDtypeStruct((8, 4, 2), dtype) for dtype in (jnp.int32, jnp.float32)]
        matrices = [(EXPERTS, HIDDEN, INTERMEDIATE)] * 2 + [(EXPERTS, INTERMEDIATE, HIDDEN)]
        experts = jaxmoe.Experts(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in matrices))  # pyright: ignore
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            moe = self.layer().abstract_layer(**arguments)
            tell: Any = {"shape": moe.explain, "array": moe.explain, "traced": functools.partial(traced, moe)}[given]
            told = tell(x if given == "shape" else jax.device_put(jnp.zeros(x.shape), sharding))
            options = {"activation": "relu", "residuals": "recompute", "axis_name": None, **where}
            expected = jaxmoe.explain(tokens, slots[0], slots[1], experts, **options)
        assert told == expected
        assert (told.call.shape.tokens, told.call.shape.ranks) == (tokens_per_rank * (1 + unknown), ranks)

    @pytest.mark.parametrize("preset", ["deepseek_v3", "kimi_k2", "deepseek_v4"])
    def test_a_layer_with_the_router_of_a_model_that_has_a_selection_bias_warns_when_it_is_made_without_one(
        self, preset
    ):
        arguments = {"num_experts": 16, "router": getattr(RouterConfig, preset)(top_k=2)}
        with pytest.warns(UserWarning, match=rf"MoE: .*\.{preset}\(\).* Make it with selection_bias=True") as warned:
            shapes = self.layer().shapes(**arguments)
        assert len(warned) == 1
        # Later calls, and a layer that has one, do not: here a warning is an error.
        layer = self.layer().calling(**arguments, selection_bias=True)
        jax.eval_shape(layer, shapes, jax.ShapeDtypeStruct((16,), jnp.float32), jnp.zeros((4, HIDDEN)))
        self.layer().shapes(**arguments, selection_bias=True)
        own = RouterConfig(top_k=2, score="sigmoid")
        self.layer().shapes(router=own)

    @pytest.mark.usefixtures("unchecked_shapes")
    def test_explain_refuses_what_a_call_refuses(self):
        moe = self.layer().abstract_layer()
        with pytest.raises(ValueError, match=r"MoE: x has shape \(4, 15\)"):
            moe.explain(jnp.zeros((4, 15)))
        with pytest.raises(ValueError, match=r"needs a mesh and none is set"):
            self.layer().abstract_layer(axis_name="expert").explain(jnp.zeros((4, 16)))

    @pytest.mark.usefixtures("unchecked_shapes")
    @pytest.mark.parametrize(
        ("x", "token_valid", "error", "message"),
        [
            (jnp.zeros((4, 15)), None, ValueError, r"MoE: x has shape \(4, 15\); it must be .* with hidden=16"),
            (jnp.zeros(16), None, ValueError, r"MoE: x has shape \(16,\)"),
            (jnp.zeros((4, 16), int), None, TypeError, "MoE: x is int32; it must be a float array"),
            ([1.0], None, TypeError, "MoE: x is a list; it must be an array"),
            (jnp.zeros((4, 16)), jnp.ones(4), TypeError, "MoE: token_valid is float32; it must be bool"),
            (jnp.zeros((4, 16)), jnp.ones(3, bool), ValueError, r"MoE: token_valid has shape \(3,\)"),
            (jnp.zeros((4, 16)), [True], TypeError, "MoE: token_valid is a list"),
        ],
    )
    def test_inputs_that_do_not_fit_are_refused(self, x, token_valid, error, message):
        parameters = fill(self.layer().shapes())
        with pytest.raises(error, match=message):
            self.layer().calling()(parameters, None, x, token_valid)


class TestNNX(Behaviours):
    layer = NNXLayer

    def test_a_named_implementation_is_asked_about_the_dtype_that_the_layer_computes_in(self, monkeypatch):
        monkeypatch.setattr(sharding, "platform", lambda *_: "gpu")
        monkeypatch.setattr(limits, "check_platform", lambda *_: None)
        layer = {"implementation": "megakernel"}
        for dtypes in ({"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}):
            self.layer().shapes(**layer, **dtypes)
        with pytest.raises(TypeError, match="x is float32; implementation='megakernel' on gpu takes bfloat16 and"):
            self.layer().shapes(**layer)

    def test_the_selection_bias_is_a_variable_of_its_own_kind(self):
        moe = self.layer().abstract(selection_bias=True)
        assert set(nnx.state(moe, jaxmoe.nnx.SelectionBias)) == {"selection_bias"}
        assert "selection_bias" not in nnx.state(moe, nnx.Param)
        assert moe.selection_bias.dtype == jnp.float32

    def test_a_call_of_a_layer_without_a_selection_bias_does_not_warn_again(self):
        with pytest.warns(UserWarning, match="selection_bias=True"):
            moe = self.layer().abstract(num_experts=16, router=RouterConfig.kimi_k2())
        nnx.eval_shape(lambda moe, x: moe(x), moe, jnp.zeros((4, HIDDEN)))
        moe.explain(jnp.zeros((4, HIDDEN)))

    def test_layers_of_equal_arguments_have_equal_graphs(self):
        graphs = [nnx.graphdef(self.layer().abstract(**BLOCKS["everything"].arguments)) for _ in range(2)]
        assert graphs[0] == graphs[1]
        assert hash(graphs[0]) == hash(graphs[1])


class TestLinen(Behaviours):
    layer = LinenLayer

    def test_a_call_of_a_layer_without_a_selection_bias_does_not_warn_again(self):
        arguments = {"num_experts": 16, "router": RouterConfig.kimi_k2()}
        with pytest.warns(UserWarning, match="selection_bias=True"):
            shapes = self.layer().shapes(**arguments)
        jax.eval_shape(self.layer().calling(**arguments), shapes, None, jnp.zeros((4, HIDDEN)))


@pytest.mark.parametrize("module", [jaxmoe.nnx, jaxmoe.linen])
def test_without_flax_the_import_says_how_to_install_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    spec = importlib.util.spec_from_file_location("without_flax", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(
        ModuleNotFoundError, match=r"needs Flax, which is not installed. Run: pip install 'jaxmoe\[flax"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
