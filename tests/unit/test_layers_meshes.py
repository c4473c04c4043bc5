"""Flax layers on meshes: where their parameters lie, and that they compute there what they compute on one device."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import relative_error
from tests.unit.blocks_by_hand import BIAS, BLOCKS, EXPERTS, HIDDEN, SHARED, VALID, X, fill
from tests.unit.flax_layers import MESHES, LinenLayer, NNXLayer, assert_equal, expected, make_mesh, place, run

# Of src/maxtext/configs/base.yml, in its order: those of the tokens and of the weights of an MoE layer.
MAXTEXT = [
    ("activation_batch_moe", ("data", "fsdp", "fsdp_transpose", "expert")),
    ("activation_length_moe", ("context", "context_usp_ulysses")),
    ("exp", "expert"),
    ("mlp_moe", ("fsdp_transpose", "tensor", "tensor_sequence", "autoregressive")),
    ("embed_moe", ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses")),
    ("embed_moe", ("fsdp", "context", "context_usp_ulysses")),
]
TOKENS_OF_MAXTEXT = P("activation_batch_moe", "activation_length_moe")
# Rules; which axes have two ranks beside those of the experts; axes of the tokens; and the axes that hidden and
# intermediate get: in Linen by the first rule whose axes are free, in NNX by the last one of a name.
LOGICAL: dict[str, tuple[list[Any], tuple[str, str], Any, dict[str, tuple[Any, Any]]]] = {
    "MaxText, FSDP and tensor parallel": (
        MAXTEXT,
        ("fsdp", "tensor"),
        TOKENS_OF_MAXTEXT,
        {"linen": ("fsdp", "tensor"), "nnx": ("fsdp", "tensor")},
    ),
    "MaxText, FSDP of both dimensions": (
        MAXTEXT,
        ("fsdp", "fsdp_transpose"),
        TOKENS_OF_MAXTEXT,
        {"linen": ("fsdp", "fsdp_transpose"), "nnx": ("fsdp", "fsdp_transpose")},
    ),
    "a rule for one rank last": (
        [("exp", "expert"), ("embed_moe", "fsdp"), ("embed_moe", None), ("mlp_moe", "tensor")],
        ("fsdp", "tensor"),
        "fsdp",
        {"linen": ("fsdp", "tensor"), "nnx": (None, "tensor")},
    ),
    "a rule for the axis of another name first": (
        [("exp", "expert"), ("embed_moe", ("fsdp", "tensor")), ("embed_moe", "fsdp"), ("mlp_moe", "tensor")],
        ("fsdp", "tensor"),
        ("fsdp", "tensor"),
        {"linen": (("fsdp", "tensor"), None), "nnx": ("fsdp", "tensor")},
    ),
}


class Behaviours:
    """What a layer of either library does on a mesh."""

    layer: Any
    library: str
    looks_up: dict[str, Any]

    @pytest.mark.parametrize("mesh_name", [name for name in MESHES if name != "no mesh"])
    def test_on_a_mesh_it_computes_what_it_computes_on_one_device(self, mesh_name):
        assert_equal(run(self.layer, "everything", mesh_name, masked=True), expected("everything", masked=True))

    @pytest.mark.slow
    @pytest.mark.parametrize("mesh_name", [name for name in MESHES if name.startswith("explicit")])
    def test_with_explicit_axes_the_output_is_split_as_the_input_and_the_losses_are_scalars_of_all_tokens(
        self, mesh_name
    ):
        result, spec = run(self.layer, "everything", mesh_name, masked=True), MESHES[mesh_name][2]
        assert jax.typeof(result.y).sharding.spec == P(*spec, None, None)
        for scalar in (result.aux.load_balancing_loss, result.aux.router_z_loss, result.aux.stats.unused_slots):
            assert scalar.shape == ()
            assert scalar.sharding.is_fully_replicated

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_parameters_carry_their_axes_and_lie_where_these_say(self, axis_type):
        arguments = {
            **BLOCKS["everything"].arguments,
            "axis_name": "expert",
            "data_axes": "data",
            "hidden_axis": "data",
        }
        ones = jax.nn.initializers.ones
        mesh = make_mesh(axis_type)
        with jax.set_mesh(mesh):
            names = self.layer().names(**arguments)
            parameters = self.layer().initial(**arguments, kernel_init=ones, router_init=ones)
        assert names == {
            "router_kernel": (None, None),
            "router_bias": (None,),
            "w_gate": ("expert", "data", None),
            "w_up": ("expert", "data", None),
            "w_down": ("expert", None, "data"),
            "b_gate": ("expert", None),
            "b_up": ("expert", None),
            "b_down": ("expert", "data"),
            "shared_w_gate": ("data", None),
            "shared_w_up": ("data", None),
            "shared_w_down": (None, "data"),
            "shared_b_gate": (None,),
            "shared_b_up": (None,),
            "shared_b_down": ("data",),
            "shared_gate_kernel": (None, None),
        }
        for name, array in parameters.items():
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, P(*names[name])), array.ndim), name
        for shard in parameters["w_gate"].addressable_shards:
            expert_rank = np.argwhere(mesh.devices == shard.device)[0][1]
            assert shard.index[0] == slice(2 * expert_rank, 2 * expert_rank + 2)

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_a_layer_made_under_jit_never_has_all_experts_on_one_device(self, axis_type):
        arguments = {
            "axis_name": "expert",
            "data_axes": "data",
            "intermediate": 256,
            "num_experts": 64,
            "gated": False,
        }
        with jax.set_mesh(make_mesh(axis_type)):
            memory = jax.jit(lambda: self.layer().initial(**arguments)).lower().compile().memory_analysis()
        all_experts = 2 * 64 * HIDDEN * 256 * 4
        assert memory is not None
        assert memory.output_size_in_bytes + memory.temp_size_in_bytes < all_experts

    def test_parameters_may_be_split_over_their_hidden_dimension_too(self):
        mesh = make_mesh(AxisType.Explicit)
        arguments = {
            **BLOCKS["everything"].arguments,
            "axis_name": "expert",
            "data_axes": "data",
            "hidden_axis": "data",
        }
        with jax.set_mesh(mesh):
            parameters, names = fill(self.layer().shapes(**arguments)), self.layer().names(**arguments)
            placed = {name: place(array, mesh, P(*names[name])) for name, array in parameters.items()}
            # The tokens' hidden dimension is split as well, over the axis that the experts use.
            x = place(X(), mesh, P("data", None, "expert"))
            y, _ = jax.jit(self.layer().calling(**arguments))(placed, BIAS(), x)
        assert jax.typeof(y).sharding.spec == P("data", None, "expert")
        assert relative_error(y, expected("everything").y) < 1e-5

    @pytest.mark.parametrize("name", LOGICAL)
    def test_a_layer_with_logical_names_computes_where_flax_places_its_parameters_by_them(self, name):
        rules, of_two, data_axes, expected_axes = LOGICAL[name]
        hidden, intermediate = expected_axes[self.library]
        axes = dict.fromkeys((axis for _, axes in MAXTEXT for axis in ((axes,) if isinstance(axes, str) else axes)), 1)
        axes |= dict.fromkeys((*of_two, "expert"), 2)
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        arguments = {
            **BLOCKS["gpt-oss"].arguments,
            "axis_name": "exp",
            "hidden_axis": "embed_moe",
            "intermediate_axis": "mlp_moe",
            "data_axes": data_axes,
            **self.looks_up,
        }
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            made = self.layer().initial(**arguments)
            call = self.layer().abstract_layer(**arguments).explain(X()).call
            parameters = fill(self.layer().shapes(**arguments))
            y, _ = jax.jit(self.layer().calling(**arguments))(parameters, None, X())
        specs = {"w_gate": P("expert", hidden, intermediate), "w_down": P("expert", intermediate, hidden)}
        for matrix, spec in specs.items():
            assert made[matrix].sharding.is_equivalent_to(NamedSharding(mesh, spec), 3), matrix
        split = call.expert_split
        found = [P(tuple(axis for axis in names if axes[axis] > 1)) for names in (split.hidden, split.intermediate)]
        assert (call.group.axis_names, *found) == (("expert",), *(P(each or ()) for each in (hidden, intermediate)))
        assert relative_error(y, expected("gpt-oss").y) < 1e-5

    def test_a_tuple_of_one_logical_name_is_looked_up_as_the_name(self):
        arguments = {"axis_name": "exp", "hidden_axis": ("embed",), "data_axes": "data", **self.looks_up}
        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh), nn.logical_axis_rules([("exp", "expert"), ("embed", "data")]):
            made = self.layer().initial(**arguments)
            call = self.layer().abstract_layer(**arguments).explain(X()).call
        assert made["w_gate"].sharding.is_equivalent_to(NamedSharding(mesh, P("expert", "data")), 3)
        assert call.expert_split.hidden == ("data",)

    def test_a_layer_spread_over_an_axis_asks_for_a_mesh_when_it_is_called(self):
        parameters = fill(self.layer().shapes())
        with pytest.raises(ValueError, match=r"axis_name=.* needs a mesh and none is set"):
            self.layer().calling(axis_name="expert")(parameters, None, X())


class TestNNX(Behaviours):
    layer, library, looks_up = NNXLayer, "nnx", {}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("data_axes", "inner"),
        [("data", {}), ("data", {"hidden_axis": "data"}), ((), {"intermediate_axis": "data"})],
        ids=["whole experts", "FSDP", "tensor parallel"],
    )
    def test_inside_shard_map_a_split_layer_gives_what_it_gives_outside(self, data_axes, inner):
        arguments = {**BLOCKS["everything"].arguments, "axis_name": "expert", "data_axes": data_axes, **inner}
        arguments["return_routing"] = True
        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            moe = self.layer().filled(fill(self.layer().shapes(**arguments)), BIAS(), **arguments)
            graphdef, state = nnx.split(moe)
            tokens = P(("data", "expert") if data_axes else "expert")

            def on_rank(state, x, token_valid):
                moe: Any = nnx.merge(graphdef, state)
                return moe(x, token_valid)

            specs = (nnx.get_partition_spec(state), tokens, tokens)
            of_aux: Any = jaxmoe.MoEAux(P(), EXPERTS, routing=tokens, logits=tokens)  # pyright: ignore
            inside = jax.jit(jax.shard_map(on_rank, in_specs=specs, out_specs=(tokens, of_aux)))
            y, aux = inside(state, X(), jnp.asarray(VALID))
        truth = expected("everything", masked=True)
        assert relative_error(y, truth.y) < 1e-5
        assert relative_error(aux.load_balancing_loss, truth.aux[0]) < 1e-5
        assert relative_error(aux.router_z_loss, truth.aux[1]) < 1e-5
        assert relative_error(jaxmoe.router_z_loss(aux.logits, token_valid=jnp.asarray(VALID)), truth.aux[1]) < 1e-5
        np.testing.assert_array_equal(aux.stats.rows_per_expert, truth.aux[2])

    def test_a_layer_made_without_a_mesh_keeps_its_names_for_later(self):
        moe = self.layer().make(axis_name="expert", selection_bias=True, kernel_init=jax.nn.initializers.ones)
        assert moe.w_gate.get_metadata()["out_sharding"] == ("expert", None, None)
        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            state = nnx.state(moe)
            nnx.update(moe, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
        assert moe.w_gate[...].sharding.spec == P("expert", None, None)
        assert moe.selection_bias[...].sharding.is_fully_replicated

    def test_a_mesh_may_be_passed(self):
        mesh = make_mesh(AxisType.Explicit)
        arguments = {"axis_name": "expert", "data_axes": "data", "shared_intermediate": SHARED, "mesh": mesh}
        moe = self.layer().make(**arguments, kernel_init=jax.nn.initializers.ones)
        assert moe.w_gate[...].sharding.spec == P("expert", None, None)
        y, _ = nnx.jit(lambda moe, x: moe(x))(moe, place(X(), mesh, P("data")))
        assert y.sharding.spec == P("data", None, None)

    def test_axis_names_may_be_logical(self):
        with jax.set_mesh(make_mesh(AxisType.Auto)), nnx.logical_axis_rules([("embed", "data"), ("mlp", None)]):
            arguments = {"axis_name": "expert", "hidden_axis": "embed", "intermediate_axis": "mlp"}
            moe = self.layer().make(**arguments, kernel_init=jax.nn.initializers.ones)
        assert moe.w_gate.get_metadata()["out_sharding"] == ("expert", "embed", "mlp")
        assert moe.w_gate[...].sharding.spec == P("expert", "data", None)

    def test_logical_names_are_looked_up_for_the_computation_as_well(self):
        rules = [("exp", "expert"), ("embed", "data"), ("mlp", None), ("batch", ("data",))]
        arguments = {**BLOCKS["everything"].arguments, "axis_name": "exp", "data_axes": "batch", "hidden_axis": "embed"}
        with jax.set_mesh(make_mesh(AxisType.Auto)):
            with nnx.logical_axis_rules(rules):
                moe = self.layer().filled(fill(self.layer().shapes(**arguments)), BIAS(), **arguments)
            y, _ = nnx.jit(lambda moe, x: moe(x))(moe, X())  # the rules of its making count
        assert relative_error(y, expected("everything").y) < 1e-5

    @pytest.mark.parametrize("argument", ["axis_name", "hidden_axis", "intermediate_axis", "data_axes"])
    def test_a_name_that_is_neither_a_mesh_axis_nor_has_a_rule_is_refused_in_our_words(self, argument):
        refused = pytest.raises(ValueError, match=r"moe_layer: .*'embd'.* in the mesh")
        with jax.set_mesh(make_mesh(AxisType.Auto)), nnx.logical_axis_rules([("embed", "data")]), refused:
            self.layer().make(**{"axis_name": "expert", argument: "embd"})


class TestLinen(Behaviours):
    layer, library, looks_up = LinenLayer, "linen", {"partitioning": nn.with_logical_partitioning}

    def test_names_that_are_mesh_axes_are_not_looked_up(self):
        moe = self.layer().make(axis_name="expert", data_axes="data")  # nn.with_partitioning
        with jax.set_mesh(make_mesh(AxisType.Auto)), nn.logical_axis_rules([("expert", "data")]):
            assert moe.explain(X()).call.group.axis_names == ("expert",)

    def test_the_partitioning_may_be_a_function_of_the_user_s_that_wraps_initialisers(self):
        def partitioning(init, names):
            def boxed(key, shape, dtype):
                assert len(shape) == len(names)
                return nn.LogicallyPartitioned(init(key, shape, dtype), names)

            return boxed

        arguments = {"axis_name": "exp", "data_axes": "data", "partitioning": partitioning}
        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh), nn.logical_axis_rules([("exp", "expert")]):
            made = self.layer().initial(**arguments)
            call = self.layer().make(**arguments).explain(X()).call
        assert made["w_gate"].sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
        assert call.group.axis_names == ("expert",)

    def test_rules_that_come_with_the_partitioning_are_those_of_the_computation(self):
        rules = (("exp", "expert"), ("embed", "data"))
        partitioning = functools.partial(nn.with_logical_partitioning, rules=rules)
        arguments = {"axis_name": "exp", "hidden_axis": "embed", "data_axes": "data", "partitioning": partitioning}
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            made = self.layer().initial(**arguments)
            call = self.layer().make(**arguments).explain(X()).call
        assert made["w_gate"].sharding.is_equivalent_to(NamedSharding(mesh, P("expert", "data")), 3)
        assert (call.group.axis_names, call.expert_split.hidden) == (("expert",), ("data",))

    def test_axis_names_may_be_logical(self):
        moe = self.layer().make(
            axis_name="expert",
            data_axes="batch",
            hidden_axis="embed",
            partitioning=nn.with_logical_partitioning,
            kernel_init=jax.nn.initializers.ones,
        )
        rules = [("expert", "expert"), ("embed", "data"), ("batch", "data")]
        with jax.set_mesh(make_mesh(AxisType.Explicit)), nn.logical_axis_rules(rules):
            variables: Any = jax.jit(moe.init)(jax.random.key(0), X())
            y = jax.eval_shape(moe.apply, variables, X())
        assert variables["params"]["w_gate"].names == ("expert", "embed", None)
        assert variables["params"]["w_gate"].value.sharding.spec == P("expert", "data", None)
        assert y.shape == X().shape

    def test_inside_shard_map_over_the_experts_it_says_what_to_call_instead(self):
        moe = self.layer().make(axis_name="expert")
        with jax.set_mesh(make_mesh(AxisType.Auto)):
            inside = jax.shard_map(
                lambda x: moe.init_with_output(jax.random.key(0), x)[0], in_specs=P("expert"), out_specs=P("expert")
            )
            with pytest.raises(NotImplementedError, match=r"shard_map over \['expert'\].* use jaxmoe.nnx.MoE or"):
                jax.eval_shape(inside, X())
