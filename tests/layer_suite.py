"""The behaviours that every implementation of `moe_layer` has. A test class inherits `LayerSuite` and names one.

Compiling is what takes time here: a test that is not about the structure of a program calls one that others call, with
other arrays. Most call that of gated experts with biases and a mask.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.experts import LAYOUTS, split
from jaxmoe.options import Arguments
from jaxmoe.testing import ROUTING_KINDS, dense, identity_experts, make_inputs
from tests.layer_calls import (
    EXPERTS,
    HIDDEN,
    PLACEMENTS,
    TOKENS,
    TOP_K,
    LayerChecks,
    as_dict,
    cotangent,
    gradients_of,
    jitted_dense_both,
    layer,
    mesh_of,
)

# Gated or not, biases, mask: what changes the structure of the program.
STRUCTURES: dict[str, dict[str, Any]] = {
    "gated": {"gated": True},
    "gated with biases and a mask": {"gated": True, "biases": True, "token_valid": True},
    "plain": {"gated": False},
    "plain with biases": {"gated": False, "biases": True},
}
FUSED: dict[str, dict[str, Any]] = {
    "halves with biases and a mask": {"biases": True, "token_valid": True, "layout": "halves"},
    "interleaved with biases and a mask": {"biases": True, "token_valid": True, "layout": "interleaved"},
}
# Of each structure another one; relu is that of identity experts.
ACTIVATION_OF = {
    "gated": "silu",
    "gated with biases and a mask": "silu",
    "plain": "gelu_tanh",
    "plain with biases": "gelu",
}
SWIGLUS = {
    "SwiGLU": jaxmoe.SwiGLU(),
    # Limits that the unit-scale test inputs do reach.
    "SwiGLU gpt-oss": jaxmoe.SwiGLU(limit=0.7, alpha=1.702, up_offset=1.0),
    "SwiGLU DeepSeek-V4": jaxmoe.SwiGLU(limit=0.5),
}


class LayerSuite(LayerChecks):
    """Inherit and set `implementation`."""

    # --- against the truth ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    @pytest.mark.parametrize("structure", STRUCTURES)
    def test_output_and_gradients_equal_the_reference_for_every_routing(self, structure, routing):
        activation = ACTIVATION_OF[structure]
        arguments = self.inputs(1, **STRUCTURES[structure], routing=routing)
        self.check(arguments, activation=activation)
        # A call that nobody differentiates is another program.
        y, _ = self.both(arguments, activation=activation)
        self.assert_near(self.run(arguments, activation=activation), y)

    @pytest.mark.parametrize("placement", PLACEMENTS)
    def test_output_and_gradients_equal_the_reference_wherever_it_is_called(self, placement):
        self.check(self.inputs(2, biases=True, routing="zipf", token_valid=True), placement)

    @pytest.mark.parametrize("name", SWIGLUS)
    def test_output_and_gradients_equal_the_reference_for_every_swiglu(self, name):
        # So many that as many inputs round across a limit as in the same maths: of 64 tokens twice as many did (BF16).
        arguments = self.inputs(3, biases=True, token_valid=True, tokens=8 * TOKENS)
        self.check(arguments, "one rank", activation=SWIGLUS[name])

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_low_precision_costs_at_most_twice_the_error_of_the_same_maths(self, dtype):
        self.check(self.inputs(4, biases=True, dtype=dtype, routing="zipf"))

    @pytest.mark.parametrize("routing", ["zipf", "one-hot", "unused-slots"])
    @pytest.mark.parametrize("structure", ["gated with biases and a mask", "plain with biases"])
    def test_what_is_kept_for_the_backward_pass_changes_no_bit(self, structure, routing):
        arguments = self.inputs(21, **STRUCTURES[structure], routing=routing)
        options = {"activation": ACTIVATION_OF[structure]}
        saved = self.both(arguments, residuals="save", **options)
        again = self.both(arguments, residuals="recompute", **options)
        for key, value in as_dict(saved).items():
            np.testing.assert_array_equal(value, as_dict(again)[key], key)

    @pytest.mark.parametrize("residuals", ["save", "recompute"])
    @pytest.mark.parametrize("routing", ["zipf", "one-hot", "unused-slots"])
    def test_beside_frozen_experts_all_other_gradients_are_the_same(self, routing, residuals):
        arguments = self.inputs(34, biases=True, token_valid=True, routing=routing)
        run = layer("data x expert, Auto", residuals=residuals, **self.options())

        def loss(x, weights, experts):
            y = run(arguments._replace(x=x, topk_weights=weights, experts=experts)).astype(jnp.float32)
            return jnp.sum(jnp.where(arguments.token_valid[:, None], jnp.sin(y), 0))

        differentiated = arguments.x, arguments.topk_weights, arguments.experts
        frozen = jax.jit(jax.grad(loss, (0, 1)))(*differentiated)
        trained = jax.jit(jax.grad(loss, (0, 1, 2)))(*differentiated)
        for found, expected in zip(frozen, trained[:2], strict=True):
            assert np.asarray(expected, np.float32).any()
            if self.implementation == "megakernel":
                np.testing.assert_array_equal(found, expected)
            else:
                self.assert_near(found, expected)

    @pytest.mark.parametrize("residuals", ["save", "recompute"])
    def test_gradients_of_experts_are_the_same_after_a_program_in_which_they_are_frozen(self, residuals):
        # With jax 0.12.0.1 the last program takes the forward pass as the first one has traced it.
        arguments = self.inputs(35)
        run = layer("data x expert, Auto", residuals=residuals, **self.options())

        def apply(x, experts):
            return x + run(arguments._replace(x=x, experts=experts))

        def gradients(one_layer):
            def loss(layers, x):
                return jnp.sum(jnp.sin(jax.lax.scan(lambda x, own: (one_layer(x, own), None), x, layers)[0]))

            return jax.jit(jax.grad(loss))(
                jax.tree.map(lambda array: jnp.stack([array] * 2), arguments.experts), arguments.x
            )

        expected = gradients(apply)
        frozen = jax.jit(jax.grad(lambda x, experts: jnp.sum(jnp.sin(apply(x, experts)))))(
            arguments.x, arguments.experts
        )
        assert np.asarray(frozen).any()
        found = gradients(jax.checkpoint(apply, prevent_cse=False))
        for (path, value), want in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
        ):
            assert np.asarray(want, np.float32).any(), path
            self.assert_near(value, want)

    @pytest.mark.parametrize("routing", ["zipf", "one-hot"])
    def test_experts_in_float32_get_gradients_in_float32_that_round_to_those_of_narrow_experts(self, routing):
        arguments = self.inputs(22, biases=True, routing=routing, dtype=jnp.bfloat16)
        # Without a data axis, over which JAX would sum what has been rounded to either type.
        narrow = as_dict(self.gradients(arguments, "all devices"))
        widened_experts = arguments._replace(experts=arguments.experts.astype(jnp.float32))
        wide = as_dict(self.gradients(widened_experts, "all devices"))
        of_experts = [key for key, value in wide.items() if value.dtype != narrow[key].dtype]
        assert len(of_experts) == len(jax.tree.leaves(arguments.experts))
        for key, value in wide.items():
            np.testing.assert_array_equal(value.astype(narrow[key].dtype), narrow[key], key)

    @pytest.mark.parametrize("routing", ["zipf", "one-hot", "unused-slots"])
    @pytest.mark.parametrize("structure", FUSED)
    def test_gate_and_up_in_one_array_equal_the_reference_and_have_the_output_of_two(self, structure, routing):
        arguments = self.inputs(29, **FUSED[structure], routing=routing)
        self.check(arguments)
        apart = arguments._replace(experts=split(arguments.experts))
        np.testing.assert_array_equal(self.both(arguments)[0], self.both(apart)[0])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_what_is_kept_of_gate_and_up_in_one_array_changes_nothing(self, layout):
        """No bit of the megakernel. What nobody keeps XLA may round less often: 1 bit of BF16 on GPUs (jax 0.11.2)."""
        arguments = self.inputs(33, biases=True, token_valid=True, routing="zipf", layout=layout)
        kept, again = (self.both(arguments, residuals=residuals) for residuals in ("save", "recompute"))
        if self.implementation == "megakernel":
            jax.tree.map(np.testing.assert_array_equal, kept, again)
        else:
            self.assert_near(kept, again)

    @settings(max_examples=4)
    @given(
        tokens=st.integers(1, 24),
        hidden=st.integers(1, 40),
        intermediate=st.integers(1, 40),
        experts_per_rank=st.integers(1, 5),
        top_k=st.integers(1, 4),
        routing=st.sampled_from(ROUTING_KINDS),
        structure=st.sampled_from(sorted(STRUCTURES | FUSED)),
        plan_number=st.integers(1, 200),
        seed=st.integers(0, 99),
    )
    def test_output_and_gradients_equal_the_reference_for_any_size(
        self, tokens, hidden, intermediate, experts_per_rank, top_k, routing, structure, plan_number, seed
    ):
        arguments = make_inputs(
            seed,
            dtype=self.dtype,
            tokens=8 * tokens,
            hidden=self.width_multiple * hidden,
            intermediate=self.width_multiple * intermediate,
            num_experts=4 * experts_per_rank,
            top_k=min(top_k, 4 * experts_per_rank),
            routing=routing,
            **(STRUCTURES | FUSED)[structure],
        )
        self.check(arguments, plan=self.plan_of(plan_number))

    @pytest.mark.parametrize("structure", ["gated with biases and a mask", "plain with biases"])
    def test_gradients_equal_finite_differences_in_float64(self, structure):
        with jax.enable_x64(True):
            sizes = {"tokens": 8, "hidden": 6, "intermediate": 5, "num_experts": 4, "top_k": 2}
            a = make_inputs(5, **sizes, **STRUCTURES[structure], dtype=jnp.float64)
            a = a._replace(x=jnp.nan_to_num(a.x), topk_weights=a.topk_weights.astype(jnp.float64))
            run = layer("data x expert, Auto", implementation=self.implementation, activation="silu")

            @jax.jit
            @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
            def loss(x, weights, experts):
                return jnp.sum(run(a._replace(x=x, topk_weights=weights, experts=experts)) ** 2)

            at = (a.x, a.topk_weights, a.experts)
            _, gradients = loss(*at)
            rng, step = np.random.default_rng(0), 1e-6
            for _ in range(3):
                along = jax.tree.map(lambda array: jnp.asarray(rng.standard_normal(array.shape)), at)
                ahead, _ = loss(*jax.tree.map(lambda p, d: p + step * d, at, along))
                behind, _ = loss(*jax.tree.map(lambda p, d: p - step * d, at, along))
                slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: jnp.vdot(g, d), gradients, along)))
                np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-6)

    # --- closed forms -----------------------------------------------------------------------------------------------

    def test_identity_experts_return_the_tokens_times_their_weights(self):
        arguments = self.inputs(6)._replace(experts=identity_experts(EXPERTS, HIDDEN, self.dtype))
        arguments = arguments._replace(topk_weights=jnp.full((TOKENS, TOP_K), 1.0, jnp.float32).at[:, 2].set(2.0))
        y, _ = self.both(arguments, activation="relu")
        np.testing.assert_array_equal(y, 4 * arguments.x)

    def test_gradients_of_identity_experts_are_the_cotangents_times_the_weights(self):
        arguments = self.inputs(6)._replace(experts=identity_experts(EXPERTS, HIDDEN, self.dtype))
        arguments = arguments._replace(topk_weights=jnp.full((TOKENS, TOP_K), 1.0, jnp.float32).at[:, 2].set(2.0))
        _, (dx, dweights, _) = self.both(arguments, activation="relu")
        dy = cotangent(arguments.x)
        self.assert_near(dx, 4 * dy)
        self.assert_near(dweights, jnp.broadcast_to((dy * arguments.x).sum(-1, keepdims=True), (TOKENS, TOP_K)))

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.uint32])
    def test_ids_of_every_integer_type_name_the_same_experts(self, dtype):
        num_experts = self.most_experts if jnp.iinfo(dtype).bits == 8 else EXPERTS
        arguments = self.inputs(27, num_experts=num_experts)
        ids = jnp.minimum(arguments.topk_ids, min(jnp.iinfo(dtype).max, 2**31 - 1))
        options: dict[str, Any] = {"plan": None, "return_stats": True}
        y, stats = self.run(arguments._replace(topk_ids=ids.astype(dtype)), "all devices", **options)
        expected, counted = self.run(arguments._replace(topk_ids=ids), "all devices", **options)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(stats.rows_per_expert, counted.rows_per_expert)
        assert np.asarray(y).any()

    def test_a_token_that_names_an_expert_twice_gets_it_twice(self):
        arguments = self.inputs(7)
        ids, weights = arguments.topk_ids.at[:, 1].set(arguments.topk_ids[:, 0]), arguments.topk_weights
        merged = jnp.stack([weights[:, 0] + weights[:, 1], jnp.zeros(TOKENS), weights[:, 2]], axis=1)
        once = arguments._replace(topk_ids=ids.at[:, 1].set(-1), topk_weights=merged)
        y, expected = self.run(arguments._replace(topk_ids=ids)), self.run(once)
        self.assert_near(y, expected)

    def test_ids_outside_the_experts_are_unused_slots_and_counted(self):
        arguments = self.inputs(8)
        bad = arguments.topk_ids.at[0, 0].set(EXPERTS).at[1, 1].set(-7).at[2, 2].set(2**31 - 1).at[3, 0].set(-1)
        unused = arguments.topk_ids.at[jnp.arange(4), jnp.array([0, 1, 2, 0])].set(-1)
        y, stats = self.run(arguments._replace(topk_ids=bad), return_stats=True)
        np.testing.assert_array_equal(y, self.run(arguments._replace(topk_ids=unused)))
        assert (int(stats.out_of_range_ids), int(stats.unused_slots)) == (3, 4)
        assert int(stats.rows_per_expert.sum()) == TOKENS * TOP_K - 4
        counts = np.bincount(np.asarray(unused)[np.asarray(unused) >= 0], minlength=EXPERTS)
        np.testing.assert_array_equal(stats.rows_per_expert, counts)

    # --- edges ------------------------------------------------------------------------------------------------------

    def test_zero_tokens_give_zero_tokens_and_zero_gradients(self):
        arguments = self.inputs(9, tokens=0)
        y, (dx, _, dexperts) = self.both(arguments)
        assert y.shape == dx.shape == (0, HIDDEN)
        assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(dexperts))

        def loss(x: jax.Array) -> Any:
            y, stats = self.run(masked._replace(x=x), "all devices", return_stats=True)
            return y.sum(), stats

        masked = arguments._replace(token_valid=jnp.zeros((0,), bool))
        _, stats = jax.jit(jax.grad(loss, has_aux=True))(arguments.x)
        assert int(stats.rows_per_expert.sum()) == 0

    def test_an_expert_without_rows_gets_gradients_of_exactly_zero(self):
        arguments = self.inputs(10, biases=True, token_valid=True, routing="empty-expert")
        assert not (np.asarray(arguments.topk_ids) == 0).any()
        _, (_, _, dexperts) = self.both(arguments)
        for leaf in jax.tree.leaves(dexperts):
            assert not np.asarray(leaf[0]).any()
            assert np.asarray(leaf[1:]).any()

    def test_unused_slots_get_weight_gradients_of_exactly_zero(self):
        arguments = self.inputs(11, routing="unused-slots")
        arguments = arguments._replace(topk_weights=jnp.where(arguments.topk_ids < 0, jnp.nan, arguments.topk_weights))
        _, (_, dweights, _) = self.both(arguments)
        unused = np.asarray(arguments.topk_ids) < 0
        assert not np.asarray(dweights)[unused].any()
        assert np.asarray(dweights)[~unused].all()

    def test_nan_in_a_masked_token_reaches_nothing(self):
        arguments = self.inputs(12, biases=True, token_valid=True)
        masked = ~np.asarray(arguments.token_valid)
        assert np.isnan(np.asarray(arguments.x)[masked]).all()
        weights = jnp.where(masked[:, None], jnp.nan, arguments.topk_weights)
        output, gradients = self.both(arguments._replace(topk_weights=weights))
        y = np.asarray(output)
        assert not y[masked].any()
        assert np.isfinite(y).all()
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradients))
        assert not np.asarray(gradients[0])[masked].any()

    def test_nan_in_the_cotangent_of_a_masked_token_reaches_nothing(self):
        arguments = self.inputs(28, biases=True, token_valid=True)
        run = layer("data x expert, Auto", **self.options())

        @jax.jit
        def gradients(x, experts):
            def loss(x, experts):  # a residual around the layer, so that masked tokens' cotangents are NaN
                h = x + run(arguments._replace(x=x, experts=experts))
                return jnp.sum(jnp.where(arguments.token_valid, jnp.mean(h.astype(jnp.float32) ** 2, -1), 0))

            return jax.grad(loss, argnums=1)(x, experts)

        for leaf in jax.tree.leaves(gradients(arguments.x, arguments.experts)):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()

    def test_nan_in_a_token_stays_with_that_token_and_its_experts(self):
        arguments = self.inputs(13, routing="uniform", biases=True, token_valid=True)
        arguments = arguments._replace(token_valid=jnp.ones(TOKENS, bool), x=jnp.nan_to_num(arguments.x))
        poisoned = arguments._replace(x=arguments.x.at[5].set(jnp.nan))
        output, (dx, _, dexperts) = self.both(poisoned)
        y, clean = np.asarray(output), np.asarray(self.both(arguments)[0])
        assert np.isnan(y[5]).all()
        others = np.arange(TOKENS) != 5
        np.testing.assert_array_equal(y[others], clean[others])
        assert np.isfinite(np.asarray(dx)[others]).all()
        # The cotangent of this token's output is finite in this loss; a square makes it NaN too.
        run = layer("data x expert, Auto", **self.options())
        squared = jax.jit(jax.grad(lambda e: jnp.sum(run(poisoned._replace(experts=e)) ** 2)))(poisoned.experts)
        dexperts = dexperts, squared
        visited = np.isin(np.arange(EXPERTS), np.asarray(arguments.topk_ids)[5])
        for leaf in jax.tree.leaves(dexperts):
            finite = np.asarray(np.isfinite(np.asarray(leaf, np.float32)).reshape(EXPERTS, -1).all(-1))
            assert finite[~visited].all()

    # --- repeatable -------------------------------------------------------------------------------------------------

    def test_the_same_call_gives_the_same_bits(self):
        arguments = self.inputs(14, dtype=jnp.bfloat16, biases=True)
        first = self.both(arguments)
        for _ in range(5):
            jax.tree.map(np.testing.assert_array_equal, first, self.both(arguments))

    def test_every_plan_gives_the_same_result(self):
        arguments = self.inputs(15, routing="zipf", biases=True)
        truth = self.run(arguments, plan=None)
        for plan in self.plans:
            self.assert_near(self.run(arguments, plan=plan), truth)

    # --- transformations --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("names", [(), ("jaxmoe_gate", "jaxmoe_up")])
    def test_checkpoint_changes_no_gradient(self, names):
        arguments = self.inputs(16)
        run = layer("data x expert, Auto", **self.options())
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        gradients = gradients_of(jax.checkpoint(run, policy=policy))(arguments)
        self.assert_near(gradients, self.gradients(arguments))

    @pytest.mark.parametrize("inside", [False, True], ids=["outside shard_map", "in shard_map"])
    def test_scan_over_layers_equals_the_loop(self, inside):
        layers = [self.inputs(20 + i).experts for i in range(2)]
        arguments = self.inputs(17)
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
        run = layer("all devices" if not inside else "one rank", **self.options())
        if inside:
            run = lambda a: jaxmoe.moe_layer(*a[:4], **self.options())  # noqa: E731

        def step(x, experts):
            return x + run(arguments_of(x, experts)), None

        def arguments_of(x, experts):
            ids, weights = routing
            return Arguments(x, ids, weights, experts)

        def scanned(x, ids, weights, experts):
            nonlocal routing
            routing = ids, weights
            return jax.lax.scan(jax.checkpoint(step), x, experts)[0]

        routing: Any = None
        function = scanned
        if inside:
            specs = (P("expert"), P("expert"), P("expert"), P(None, "expert"))
            function = jax.shard_map(scanned, mesh=mesh_of("expert"), in_specs=specs, out_specs=P("expert"))
        inputs = (arguments.x, arguments.topk_ids, arguments.topk_weights)
        value, gradient = jax.jit(jax.value_and_grad(lambda e: jnp.sum(function(*inputs, e).astype(jnp.float32) ** 2)))(
            stacked
        )

        def looped(experts):
            x = arguments.x
            for i in range(2):
                one = jax.tree.map(lambda array: array[i], experts)  # noqa: B023
                x = x + dense(arguments._replace(x=x, experts=one))
            return jnp.sum(x.astype(jnp.float32) ** 2)

        expected, expected_gradient = jax.jit(jax.value_and_grad(looped))(stacked)
        self.assert_near((value, gradient), (expected, expected_gradient))

    def test_gradients_accumulate_into_donated_buffers(self):
        batches = [self.inputs(30 + i) for i in range(3)]
        mesh = mesh_of("data", "expert")
        experts = jax.device_put(batches[0].experts, NamedSharding(mesh, P("expert")))
        run = layer("data x expert, Auto", **self.options())

        @functools.partial(jax.jit, donate_argnums=0)
        def accumulate(total, experts, arguments):
            gradient = jax.grad(lambda e: jnp.sum(run(arguments._replace(experts=e)) ** 2))(experts)
            return jax.tree.map(jnp.add, total, gradient)

        total = jax.tree.map(jnp.zeros_like, experts)
        for arguments in batches:
            given = total
            total = accumulate(given, experts, arguments._replace(experts=None))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        expected = jax.grad(lambda e: sum(jnp.sum(dense(a._replace(experts=e)) ** 2) for a in batches))(experts)
        self.assert_near(total, expected)

    def test_explicit_axes_keep_the_sharding_of_the_tokens(self):
        mesh = mesh_of("data", "expert", kind=AxisType.Explicit)
        arguments = self.inputs(18)
        with jax.set_mesh(mesh):
            for spec in (P(("data", "expert"), None), P(None, None), P("data", "expert")):
                x = jax.device_put(arguments.x, NamedSharding(mesh, spec))
                run = jax.jit(lambda x: jaxmoe.moe_layer(x, *arguments[1:4], data_axes=(), **self.options()))
                y = run(x)
                assert y.sharding.spec == spec
                self.assert_near(y, dense(arguments))

    def test_any_number_of_tokens_is_split_over_all_ranks(self):
        batch, count = (3, 1, 1), 3
        arguments = self.inputs(31, tokens=count, biases=True, token_valid=True)
        x, ids, weights, valid = (
            array.reshape(*batch, *array.shape[1:]) for array in (*arguments[:3], arguments.token_valid)
        )
        y, stats = self.run(Arguments(x, ids, weights, arguments.experts, valid), "all devices", return_stats=True)
        expected = dense(arguments)
        self.assert_near(y.reshape(count, HIDDEN), jnp.where(arguments.token_valid[:, None], expected, 0))
        counted = jaxmoe.load_stats(arguments.topk_ids, EXPERTS, token_valid=arguments.token_valid)
        jax.tree.map(np.testing.assert_array_equal, stats, counted)
        whole = gradients_of(functools.partial(self.run, placement="all devices"))(arguments)
        self.assert_near(whole, jitted_dense_both("silu", None)(arguments)[1])

    def test_any_number_of_tokens_is_taken_over_explicit_axes(self):
        mesh = mesh_of("data", "expert", kind=AxisType.Explicit)
        arguments = self.inputs(32, tokens=12)
        with jax.set_mesh(mesh):
            x = jax.device_put(arguments.x.reshape(2, 6, HIDDEN), NamedSharding(mesh, P("data", None)))
            ids, weights = (array.reshape(2, 6, -1) for array in arguments[1:3])
            y = jax.jit(lambda x: jaxmoe.moe_layer(x, ids, weights, arguments.experts, **self.options()))(x)
            assert y.sharding.spec == P("data", None, None)
            self.assert_near(y.reshape(12, HIDDEN), dense(arguments))

    def test_leading_dimensions_are_kept(self):
        arguments = self.inputs(19)
        x, ids, weights = (array.reshape(8, 2, 4, -1) for array in arguments[:3])
        y = self.run(Arguments(x, ids, weights, arguments.experts))
        np.testing.assert_array_equal(y.reshape(TOKENS, HIDDEN), self.run(arguments))

    def test_vmap_raises_and_says_what_to_do(self):
        arguments = self.inputs(21)
        batched = jnp.stack([arguments.x, arguments.x])
        run = lambda x: jaxmoe.moe_layer(x, *arguments[1:4], axis_name=None, **self.options())  # noqa: E731
        with pytest.raises(NotImplementedError, match=r"pass the batch dimension along"):
            jax.vmap(run)(batched)
        with pytest.raises(NotImplementedError, match=r"jax\.lax\.scan"):
            jax.jit(jax.vmap(jax.grad(lambda x: run(x).sum())))(batched)
