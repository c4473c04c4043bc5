"""The behaviours that every implementation of `dispatch` and `combine` has, for a test class to inherit.

Compiling is what takes time here: a program has all results and gradients of both functions, and most tests feed the
same one with other arrays. `exchange_model.py` says what they are, in loops.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.quantization import dequantize_rows, quantize_rows
from jaxmoe.testing import ROUTING_KINDS, make_ids, make_inputs, relative_error
from tests import exchange_model
from tests.layer_calls import mesh_of

TOKENS, EXPERTS, TOP_K = 64, 8, 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a program runs, on a mesh with which axes, and what room it asks for."""

    axes: tuple[str, ...] = ("data", "expert")
    expert_axes: tuple[str, ...] = ("expert",)
    inside: bool = False
    explicit: bool = False
    capacity: int | None = None
    alignment: int = 1
    per_expert: bool = False

    @property
    def mesh(self) -> Any:
        return mesh_of(*self.axes, kind=AxisType.Explicit if self.explicit else AxisType.Auto)

    @property
    def ranks(self) -> int:
        return int(np.prod([self.mesh.shape[name] for name in self.expert_axes], dtype=int)) if self.expert_axes else 1

    @property
    def groups(self) -> int:
        return self.mesh.size // self.ranks if self.expert_axes else 1

    @property
    def rows(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "alignment": self.alignment, "per_expert": self.per_expert}

    @property
    def where(self) -> dict[str, Any]:
        if not self.expert_axes:
            return {"axis_name": None}
        if self.inside:
            return {"axis_name": self.expert_axes}
        data = tuple(name for name in self.axes if name not in self.expert_axes)
        return {"axis_name": self.expert_axes, "data_axes": data, "mesh": self.mesh}


ALIGNED = Setting(alignment=8)
# Of 96 slots of a group, 12 of an average expert; those of "zipf" overflow every capacity.
SETTINGS = {
    "data x expert, rows aligned": ALIGNED,
    "in shard_map, too few rows": Setting(inside=True, capacity=20, alignment=4),
    "one rank": Setting(expert_axes=(), alignment=4, capacity=160),
    "two expert axes, a capacity of each expert": Setting(
        axes=("data", "node", "gpu"), expert_axes=("node", "gpu"), capacity=10, per_expert=True
    ),
    "Explicit axes": Setting(explicit=True, alignment=2),
}


@dataclasses.dataclass(frozen=True)
class Given:
    """The arrays of all ranks that a program is fed with, and what the model makes of them."""

    x: Any
    ids: Any
    weights: Any
    valid: Any
    outputs: Any
    dy: Any
    drows: Any
    routed: list[exchange_model.Routed]  # of each group


def assert_maps_are_refused(function: Any, array: jax.Array, handle: Any, told: str) -> None:
    """Asserts that vmap of a function of an array and a handle raises, and that of its transpose."""

    def mapped_transpose(array: Any, handle: Any) -> Any:
        result, transpose = jax.vjp(lambda array: function(array, handle), array)
        return jax.vmap(transpose)(jnp.stack([result, result]))

    batch = jax.ShapeDtypeStruct((2, *array.shape), array.dtype)
    with pytest.raises(NotImplementedError, match=told):
        jax.eval_shape(jax.vmap(function, (0, None)), batch, handle)
    with pytest.raises(NotImplementedError, match=told):
        jax.eval_shape(mapped_transpose, array, handle)


class ExchangeSuite:
    """Inherit and set `implementation`."""

    implementation: ClassVar[str]
    dtype: ClassVar[Any] = jnp.float32
    outputs_dtype: ClassVar[Any] = jnp.bfloat16
    hidden: ClassVar[int] = 24
    width: ClassVar[int] = 40
    # Of tokens and of outputs, in settings where they are others.
    other_dtypes: ClassVar[dict[str, Any]] = {
        "one rank": (jnp.bfloat16, jnp.float32),
        "two expert axes, a capacity of each expert": (jnp.float16, jnp.float16),
    }

    # --- programs ---------------------------------------------------------------------------------------------------

    def dispatch(self, *arguments: Any, **options: Any) -> jaxmoe.Dispatched:
        return jaxmoe.dispatch(*arguments, implementation=self.implementation, **options)  # pyright: ignore

    @classmethod
    @functools.cache
    def program(cls, setting: Setting) -> Any:
        """Everything that the two functions have, jitted: results and gradients for all arguments."""

        def of_rank(x: Any, ids: Any, weights: Any, valid: Any, outputs: Any, dy: Any, drows: Any) -> Any:
            def send(x: Any) -> Any:
                dispatched = cls().dispatch(
                    x, ids, num_experts=EXPERTS, token_valid=valid, **setting.rows, **setting.where
                )
                return dispatched.rows, dispatched

            _, pull_back, dispatched = jax.vjp(send, x, has_aux=True)
            y, transpose = jax.vjp(lambda o, w: jaxmoe.combine(o, w, dispatched.handle), outputs, weights)
            sizes = None if setting.per_expert else dispatched.group_sizes
            handle = dispatched.handle
            sources = handle.source_rank, handle.source_slot, handle.source_token
            return dispatched, sizes, dispatched.row_valid, sources, y, pull_back(drows)[0], transpose(dy)

        if not setting.inside:
            return jax.jit(of_rank)
        split = P(setting.axes)
        return jax.jit(jax.shard_map(of_rank, mesh=setting.mesh, in_specs=split, out_specs=split))

    def given(
        self, setting: Setting, ids: np.ndarray, masked: tuple[int, int] = (0, 0), dtypes: tuple[Any, Any] | None = None
    ) -> Given:
        """Returns arrays of all ranks. What is nobody's, or of tokens `masked` (from, to), holds NaN."""
        rng, (dtype, outputs_dtype) = np.random.default_rng(0), dtypes or (self.dtype, self.outputs_dtype)
        shards = setting.groups * setting.ranks
        tokens = np.arange(len(ids))
        valid = ~((tokens >= masked[0]) & (tokens < masked[1]))
        used = np.where(valid[:, None] & (ids >= 0) & (ids < EXPERTS), ids, -1)
        of_groups = used.reshape(setting.groups, setting.ranks, -1, ids.shape[1])
        routed = [exchange_model.route(each, EXPERTS, **setting.rows) for each in of_groups]
        rows = routed[0].row_sources.shape[1]
        places: tuple[int, ...] = (shards * rows,)
        if setting.capacity is not None and setting.per_expert:
            places = (shards * (EXPERTS // setting.ranks), setting.capacity)
        nobody = np.stack([each.row_sources for each in routed]).reshape(places)[..., None] < 0

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        x = np.where(valid[:, None], normal(len(ids), self.hidden), np.nan)
        outputs, drows = normal(*places, self.width), normal(*places, self.hidden)
        dy = np.where((used >= 0).any(1)[:, None], normal(len(ids), self.width), np.nan)
        return Given(
            jnp.asarray(x, dtype),
            jnp.asarray(ids),
            jnp.asarray(np.where(used >= 0, rng.random(ids.shape) + 0.1, np.nan), jnp.float32),
            jnp.asarray(valid),
            jnp.asarray(np.where(nobody, np.nan, outputs), outputs_dtype),
            jnp.asarray(dy, outputs_dtype),
            jnp.asarray(np.where(nobody, np.nan, drows), dtype),
            routed,
        )

    def check(self, setting: Setting, ids: np.ndarray, **options: Any) -> None:
        """Holds all results to the model: rows and routes exactly, sums and gradients to one rounding."""
        given = self.given(setting, ids, **options)
        arrays = given.x, given.ids, given.weights, given.valid, given.outputs, given.dy, given.drows
        dispatched, sizes, row_valid, sources, y, dx, (doutputs, dweights) = self.program(setting)(*arrays)
        assert (y.dtype, dx.dtype, doutputs.dtype) == (given.outputs.dtype, given.x.dtype, given.outputs.dtype)

        def in_groups(array: Any, *shape: int) -> np.ndarray:
            return np.asarray(array).reshape(setting.groups, setting.ranks, *shape)

        handle, local = dispatched.handle, EXPERTS // setting.ranks
        top_k, hidden, width = ids.shape[1], self.hidden, self.width
        x, drows = in_groups(given.x, -1, hidden), in_groups(given.drows, -1, hidden)
        weights, dy = in_groups(given.weights, -1, top_k), in_groups(given.dy, -1, width)
        outputs, used = in_groups(given.outputs, -1, width), in_groups(given.ids, -1, top_k)
        for group, routed in enumerate(given.routed):
            result = {
                "row_sources": in_groups(handle.row_sources, -1)[group],
                "slot_rows": in_groups(handle.slot_rows, -1, top_k)[group],
                "rows_per_expert": in_groups(dispatched.rows_per_expert, local)[group],
                "dropped_rows": in_groups(dispatched.dropped_rows, local)[group],
            }
            if sizes is not None:
                result["group_sizes"] = in_groups(sizes, local)[group]
            expected = routed
            if setting.expert_axes and not setting.inside:
                expected = exchange_model.with_all_rows_in_groups(routed)
            for name, value in result.items():
                np.testing.assert_array_equal(value, getattr(expected, name), name)
            rows = exchange_model.rows_of(routed, x[group])
            np.testing.assert_array_equal(in_groups(dispatched.rows, -1, hidden)[group], rows)
            somebody = routed.row_sources >= 0
            np.testing.assert_array_equal(in_groups(row_valid, -1)[group], somebody)
            parts = (routed.row_sources // 2**24, routed.row_sources % 2**24, routed.row_sources % 2**24 // top_k)
            for source, part in zip(sources, parts, strict=True):
                np.testing.assert_array_equal(in_groups(source, -1)[group], np.where(somebody, part, -1))

            outputs_of, weights_of, ones = outputs[group], weights[group], np.ones(used[group].shape)
            sums = exchange_model.sums_of(routed, used[group], outputs_of, weights_of)
            self.assert_near(in_groups(y, -1, width)[group], sums)
            self.assert_near(
                in_groups(dx, -1, hidden)[group], exchange_model.sums_of(routed, used[group], drows[group], ones)
            )
            for value, truth in zip(
                (in_groups(doutputs, -1, width), in_groups(dweights, -1, top_k)),
                exchange_model.transposed_sums(routed, used[group], outputs_of, weights_of, dy[group]),
                strict=True,
            ):
                self.assert_near(value[group], truth)

    def assert_near(self, value: Any, truth: Any) -> None:
        """One rounding to the dtype of the value, and what sums in float32 may be off."""
        one_rounding = 0.51 * float(jnp.finfo(value.dtype).eps)
        np.testing.assert_allclose(np.asarray(value, np.float64), truth, rtol=one_rounding, atol=1e-5)

    # --- what a loop over ranks and slots says ----------------------------------------------------------------------

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_rows_routes_sums_and_gradients_are_those_of_a_loop_over_ranks_and_slots(self, routing):
        self.check(ALIGNED, make_ids(np.random.default_rng(1), TOKENS, EXPERTS, TOP_K, routing))

    @pytest.mark.parametrize("name", SETTINGS)
    def test_the_same_holds_for_every_mesh_and_room_and_any_two_dtypes(self, name):
        setting, dtypes = SETTINGS[name], self.other_dtypes.get(name, (self.dtype, self.outputs_dtype))
        ids = make_ids(np.random.default_rng(2), TOKENS, EXPERTS, TOP_K, "zipf")
        ids[5, 1], ids[6, 0] = -1, ids[6, 2]
        self.check(setting, ids, masked=(8, 14), dtypes=dtypes)
        if setting.capacity is not None:
            of_groups = self.given(setting, ids, masked=(8, 14)).routed
            assert any(each.dropped_rows.any() for each in of_groups), "no row was dropped: a test of nothing"

    def test_a_rank_whose_tokens_are_all_masked_sends_nothing_and_gets_its_rows(self):
        ids = make_ids(np.random.default_rng(3), TOKENS, EXPERTS, TOP_K, "uniform")
        per_rank = TOKENS // (ALIGNED.groups * ALIGNED.ranks)
        self.check(ALIGNED, ids, masked=(per_rank, 2 * per_rank))

    def test_ids_outside_the_experts_are_unused_slots(self):
        ids = make_ids(np.random.default_rng(4), TOKENS, EXPERTS, TOP_K, "uniform")
        ids[0, 0], ids[1, 1], ids[2], ids[3, 2] = EXPERTS, -7, 2**31 - 1, -(2**31)
        self.check(ALIGNED, ids)

    # --- closed forms -----------------------------------------------------------------------------------------------

    def whole(self, count: int = TOKENS, seed: int = 6) -> tuple[jax.Array, jax.Array]:
        """Small whole numbers, of which sums are exact, and ids with unused slots."""
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.integers(-8, 9, (count, self.hidden)), self.dtype)
        return x, jnp.asarray(make_ids(rng, count, EXPERTS, TOP_K, "unused-slots"))

    def test_rows_that_come_back_are_the_tokens_times_the_sum_of_their_weights(self):
        x, ids = self.whole()
        # Each of the two compiles by itself, and the handle goes from one to the other.
        dispatched = self.dispatch(x, ids, num_experts=EXPERTS, **ALIGNED.where)
        weights = jnp.tile(jnp.array([0.5, 2.0, 1.0], jnp.float32), (TOKENS, 1))
        y = jaxmoe.combine(dispatched.rows, weights, dispatched.handle)
        np.testing.assert_array_equal(y, x * jnp.where(ids >= 0, weights, 0).sum(-1, keepdims=True).astype(x.dtype))
        assert int(dispatched.rows_per_expert.sum()) == int((ids >= 0).sum())

    def test_without_weights_each_is_one_also_in_the_gradient(self):
        x, ids = self.whole()
        dispatched = self.dispatch(x, ids, num_experts=EXPERTS, **ALIGNED.where)
        ones, handle = jnp.ones(ids.shape, jnp.float32), dispatched.handle

        @jax.jit
        def both(rows: Any, dy: Any) -> Any:
            y, transpose = jax.vjp(lambda rows: jaxmoe.combine(rows, None, handle), rows)
            weighted, with_ones = jax.vjp(lambda rows: jaxmoe.combine(rows, ones, handle), rows)
            return (y, transpose(dy)), (weighted, with_ones(dy))

        jax.tree.map(np.testing.assert_array_equal, *both(dispatched.rows, x))

    def test_ids_of_unsigned_integers_name_the_same_experts(self):
        x, ids = self.whole(16)
        ids = jnp.where(ids < 0, 100, ids)
        rows, expected = (
            self.dispatch(x, each, num_experts=EXPERTS, axis_name=None).rows for each in (ids.astype(jnp.uint8), ids)
        )
        np.testing.assert_array_equal(rows, expected)
        assert np.asarray(rows).any()

    def test_a_routing_names_the_experts_and_says_how_many_there_are(self):
        x, _ = self.whole(16)
        routing = jaxmoe.route(jax.random.normal(jax.random.key(0), (16, EXPERTS)), jaxmoe.RouterConfig(top_k=TOP_K))
        of_routing = self.dispatch(x, routing, axis_name=None)
        of_ids = self.dispatch(x, routing.topk_ids, num_experts=EXPERTS, axis_name=None)
        assert of_routing.handle.call == of_ids.handle.call
        np.testing.assert_array_equal(of_routing.rows, of_ids.rows)

    @pytest.mark.parametrize("options", [{"alignment": 4, "precision": "fp8"}, {"capacity": 4, "per_expert": True}])
    def test_zero_tokens_give_zero_rows_zero_tokens_and_zero_gradients(self, options):
        x, ids, weights = (
            jnp.zeros((0, 5, self.hidden), self.dtype),
            jnp.zeros((0, 5, 2), jnp.int32),
            jnp.ones((0, 5, 2)),
        )

        def loss(x: Any, weights: Any) -> Any:
            dispatched = self.dispatch(x, ids, num_experts=EXPERTS, **options, **ALIGNED.where)
            y = jaxmoe.combine(dispatched.wide_rows, weights, dispatched.handle)
            return y.sum(), (y, dispatched.rows, dispatched.rows_per_expert)

        gradients, (y, arrived, counts) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, weights)
        assert (y.shape, *map(jnp.shape, gradients)) == (x.shape, x.shape, weights.shape)
        assert not np.asarray(arrived, np.float32).any()
        assert not np.asarray(counts).any()

    def test_the_same_call_gives_the_same_bits(self):
        given = self.given(ALIGNED, make_ids(np.random.default_rng(7), TOKENS, EXPERTS, TOP_K, "zipf"))
        arrays = given.x, given.ids, given.weights, given.valid, given.outputs, given.dy, given.drows
        first = self.program(ALIGNED)(*arrays)
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, first, self.program(ALIGNED)(*arrays))

    # --- rows in 8 bits ---------------------------------------------------------------------------------------------

    def test_tokens_are_rounded_before_they_travel_with_the_gradient_of_those_that_are_not(self):
        rng = np.random.default_rng(8)
        x = jnp.asarray(rng.standard_normal((TOKENS, 256)), self.dtype)
        ids = jnp.asarray(make_ids(rng, TOKENS, EXPERTS, TOP_K, "unused-slots"))

        def send(precision: Any) -> Any:
            def wide_rows(x: Any) -> Any:
                dispatched = self.dispatch(x, ids, num_experts=EXPERTS, precision=precision, **ALIGNED.where)
                return dispatched.wide_rows, dispatched

            rows, pull_back, dispatched = jax.vjp(wide_rows, x, has_aux=True)
            return rows, dispatched, pull_back(jnp.cos(jnp.arange(rows.size, dtype=rows.dtype)).reshape(rows.shape))[0]

        (wide_rows, dispatched, dx), (exact, unrounded, expected) = jax.jit(lambda: (send("fp8"), send(None)))()
        assert relative_error(dx, expected) < 1e-6
        for name in ("row_sources", "slot_rows"):
            np.testing.assert_array_equal(getattr(dispatched.handle, name), getattr(unrounded.handle, name))
        assert unrounded.scales is None
        self.check_rounding(dispatched, exact, power_of_two=False)
        decoded = jax.jit(dequantize_rows, static_argnums=2)(dispatched.rows, dispatched.scales, self.dtype)
        np.testing.assert_array_equal(wide_rows, decoded)

    def test_scales_may_be_powers_of_two(self):
        x, ids = self.whole(8)
        x = x.at[0].mul(3)
        options: dict[str, Any] = {"num_experts": EXPERTS, "capacity": 8, "per_expert": True, "axis_name": None}
        exact = self.dispatch(x, ids, **options).rows
        self.check_rounding(self.dispatch(x, ids, precision="fp8-e8m0", **options), exact, power_of_two=True)

    def check_rounding(self, dispatched: jaxmoe.Dispatched, exact: Any, power_of_two: bool) -> None:
        """Rows are copies of tokens, each rounded by itself; what is nobody's has scales of zero."""
        assert dispatched.rows.dtype == jnp.float8_e4m3fn
        valid = np.asarray(dispatched.row_valid)
        assert 0 < valid.sum() < valid.size
        rows = exact.reshape(-1, exact.shape[-1])
        # On a CPU: on GPUs XLA's division is not always rounded to the nearest.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            values, scales = jax.jit(quantize_rows, static_argnums=1)(jnp.asarray(np.asarray(rows)), power_of_two)
        for got, want in ((dispatched.rows, values), (dispatched.scales, scales)):
            wanted = np.where(valid[..., None], np.asarray(want, np.float32).reshape(*valid.shape, -1), 0)
            np.testing.assert_array_equal(np.asarray(got, np.float32), wanted)

    def test_gradients_of_rows_in_8_bits_are_refused_and_those_of_constants_are_none(self):
        x, ids = self.whole(8)

        def loss(x: Any, constant: bool) -> Any:
            dispatched = self.dispatch(x, ids, num_experts=EXPERTS, axis_name=None, precision="fp8")
            rows = jax.lax.stop_gradient(dispatched.rows) if constant else dispatched.rows
            return jnp.sum(rows.astype(jnp.float32)) + dispatched.wide_rows.sum()

        with pytest.raises(TypeError, match=r"gradients with respect to rows in 8 bits.*dispatched\.wide_rows"):
            jax.grad(loss)(x, False)
        slots = (ids >= 0).sum(-1, keepdims=True)
        np.testing.assert_array_equal(jax.grad(loss)(x, True), jnp.broadcast_to(slots, x.shape))

    def test_a_product_of_8_bits_has_the_gradient_of_the_rows_that_it_is_given_besides(self):
        x, ids = self.whole(8)
        matrix = jnp.asarray(np.random.default_rng(12).integers(-2, 3, (self.hidden, self.hidden)), self.dtype)

        @jax.custom_vjp
        def product(values: Any, scales: Any, wide_rows: Any) -> Any:
            return dequantize_rows(values, scales, self.dtype) @ matrix

        product.defvjp(lambda *arrays: (product(*arrays), None), lambda _, dy: (None, None, dy @ matrix.T))

        def loss(x: Any) -> Any:
            dispatched = self.dispatch(x, ids, num_experts=EXPERTS, axis_name=None, precision="fp8")
            values, scales = jax.lax.stop_gradient((dispatched.rows, dispatched.scales))
            outputs = jax.checkpoint(product)(values, scales, dispatched.wide_rows)
            return jaxmoe.combine(outputs, None, dispatched.handle).sum()

        slots = (ids >= 0).sum(-1, keepdims=True)
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), slots * matrix.sum(1))

    # --- a layer of one's own ---------------------------------------------------------------------------------------

    def test_a_scan_over_checkpointed_layers_of_ones_own_gives_what_moe_layer_gives(self):
        arguments, experts = own_layers(self.hidden)

        def layers(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
            def layer(x: Any, experts: Any) -> Any:
                dispatched = self.dispatch(x, ids, num_experts=EXPERTS, alignment=8)
                times = functools.partial(jax.lax.ragged_dot, group_sizes=dispatched.group_sizes)
                gate, up = times(dispatched.rows, experts.w_gate), times(dispatched.rows, experts.w_up)
                answers = times(jax.nn.silu(gate) * up, experts.w_down)
                return x + jaxmoe.combine(answers, weights, dispatched.handle), None

            return jax.lax.scan(jax.checkpoint(layer), x, experts)[0]

        tokens = P(("data", "expert"))
        specs = tokens, tokens, tokens, P(None, "expert")
        sharded = jax.shard_map(layers, mesh=mesh_of("data", "expert"), in_specs=specs, out_specs=tokens)
        for value, truth in zip(
            jax.tree.leaves(with_gradients(sharded)(arguments, experts)), truth_of_own_layers(self.hidden), strict=True
        ):
            assert relative_error(value, truth) < 1e-5

    @pytest.mark.parametrize("alignment", [1, 8])
    def test_a_grouped_product_outside_of_shard_map_multiplies_every_ranks_rows_with_its_own_experts(self, alignment):
        x, ids = self.whole(8)
        numbers = np.random.default_rng(2).integers(-3, 4, (EXPERTS, self.hidden, 8))
        matrices, biases = jnp.asarray(numbers, x.dtype), jnp.arange(EXPERTS, dtype=x.dtype)

        def products(x: Any, matrices: Any) -> Any:
            sent = self.dispatch(x, ids, num_experts=EXPERTS, mesh=mesh_of("expert"), alignment=alignment)
            rows = jax.lax.ragged_dot(sent.rows, matrices, sent.group_sizes)
            rows += jnp.repeat(biases, sent.group_sizes, total_repeat_length=len(rows))[:, None]
            return jaxmoe.combine(rows, None, sent.handle)

        used = np.asarray(jax.nn.one_hot(ids, EXPERTS).sum(1))  # none for -1

        def truth(x: Any, matrices: Any) -> Any:
            return jnp.einsum("td,te,edw->tw", x, used, matrices) + used @ np.arange(EXPERTS)[:, None]

        def with_both_gradients(function: Any, *arguments: Any) -> Any:
            y, transpose = jax.vjp(function, *arguments)
            return y, *transpose(jnp.cos(y))

        value = jax.jit(functools.partial(with_both_gradients, products))(x, matrices)
        expected = with_both_gradients(truth, *(array.astype(jnp.float32) for array in (x, matrices)))
        for got, want in zip(value, expected, strict=True):
            assert relative_error(got, want) < (1e-5 if got.dtype == jnp.float32 else 4 * jnp.finfo(got.dtype).eps)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_tokens_that_all_ranks_are_given_are_sent_by_all_of_them(self, check_vma):
        x, ids = self.whole(8)
        mesh = mesh_of("expert")

        def round_trip(x: Any, ids: Any) -> Any:
            dispatched = self.dispatch(x, ids, num_experts=EXPERTS)
            return jaxmoe.combine(dispatched.rows, None, dispatched.handle), dispatched.rows_per_expert

        sharded = jax.shard_map(round_trip, mesh=mesh, in_specs=P(), out_specs=P("expert"), check_vma=check_vma)

        @functools.partial(jax.grad, has_aux=True)
        def gradient_of_sum(x: Any) -> Any:
            y, counts = sharded(x, ids)
            return y.sum(), (y, counts)

        gradient, (y, counts) = jax.jit(gradient_of_sum)(x)
        slots = (ids >= 0).sum(-1, keepdims=True)
        np.testing.assert_array_equal(y, jnp.tile(x * slots, (mesh.size, 1)))
        np.testing.assert_array_equal(gradient, jnp.broadcast_to(mesh.size * slots, x.shape))
        assert int(counts.sum()) == mesh.size * int(slots.sum())

    # --- what is refused --------------------------------------------------------------------------------------------

    def test_vmap_raises_and_says_what_to_do(self):
        x, ids = self.whole(8)

        def send(x: Any) -> Any:
            return self.dispatch(x, ids, num_experts=EXPERTS, axis_name=None)

        # Traced and not run: nothing has to compile to be refused.
        rows, handle = jax.eval_shape(lambda x: (send(x).rows, send(x).handle), x)
        functions = {
            "dispatch": (lambda x, handle: send(x).rows, x),
            "combine": (lambda rows, handle: jaxmoe.combine(rows, None, handle), rows),
        }
        for name, (function, array) in functions.items():
            batch = jax.ShapeDtypeStruct((2, *array.shape), array.dtype)
            with pytest.raises(NotImplementedError, match=rf"^{name}: .*dispatch takes x .*pass the batch dimension"):
                jax.eval_shape(jax.vmap(function, (0, None)), batch, handle)

            def mapped_transpose(array: Any, handle: Any) -> Any:
                result, transpose = jax.vjp(lambda array: function(array, handle), array)  # noqa: B023
                return jax.vmap(transpose)(jnp.stack([result, result]))

            with pytest.raises(NotImplementedError, match=rf"^{name}: .*jax\.lax\.scan"):
                jax.eval_shape(mapped_transpose, array, handle)


@functools.cache
def own_layers(hidden: int) -> tuple[Any, jaxmoe.Experts]:
    """Tokens, ids and weights, and the experts of two layers stacked."""
    sizes: dict[str, Any] = {"tokens": TOKENS, "num_experts": EXPERTS, "top_k": TOP_K, "hidden": hidden}
    one, other = (make_inputs(seed, **sizes, intermediate=40, routing="zipf") for seed in (9, 10))
    return one[:3], jax.tree.map(lambda *arrays: jnp.stack(arrays), one.experts, other.experts)


def with_gradients(layers: Any) -> Any:
    """Returns the jitted output of layers and the gradients of a sum over it, of x, weights and experts."""

    def loss(x: Any, weights: Any, experts: Any, ids: Any) -> Any:
        y = layers(x, ids, weights, experts)
        return jnp.sum(jnp.sin(y)), y

    pair = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    return lambda arguments, experts: pair(arguments[0], arguments[2], experts, arguments[1])


@functools.cache
def truth_of_own_layers(hidden: int) -> list[Any]:
    """The same of `moe_layer`, on one device."""

    def layers(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
        for number in range(2):
            one = jax.tree.map(lambda array: array[number], experts)  # noqa: B023
            x += jaxmoe.moe_layer(x, ids, weights, one, axis_name=None, implementation="reference")
        return x

    return jax.tree.leaves(with_gradients(layers)(*own_layers(hidden)))
