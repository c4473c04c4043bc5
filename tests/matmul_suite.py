"""The behaviours that every implementation of `dispatch_matmul` and `matmul_combine` has, for a test class to inherit.

All numbers are small and whole, so that every product and every sum is exact and results are compared bit for bit with
those of NumPy loops (`exchange_model.py`), rounded once to the dtype.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import ROUTING_KINDS, make_ids, make_inputs
from tests import exchange_model
from tests.exchange_suite import (
    ALIGNED,
    EXPERTS,
    SETTINGS,
    TOKENS,
    TOP_K,
    Setting,
    assert_maps_are_refused,
)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Of all ranks: what a program is fed with, in float32."""

    x: np.ndarray
    first: np.ndarray  # matrices of dispatch_matmul
    rows: np.ndarray  # of matmul_combine, which do not follow from the other half
    second: np.ndarray
    weights: np.ndarray
    drows: np.ndarray
    dy: np.ndarray


class MatmulSuite:
    """Inherit and set `implementation`."""

    implementation: ClassVar[str]
    dtype: ClassVar[Any] = jnp.float32
    hidden: ClassVar[int] = 24
    inner: ClassVar[int] = 72
    width: ClassVar[int] = 40
    tokens: ClassVar[int] = TOKENS

    def dispatch_matmul(self, *arguments: Any, **options: Any) -> jaxmoe.Dispatched:
        return jaxmoe.dispatch_matmul(*arguments, implementation=self.implementation, **options)  # pyright: ignore

    @classmethod
    @functools.cache
    def program(cls, setting: Setting, weighted: bool) -> Any:
        """Everything that the two functions have, jitted: results and gradients for all arguments."""

        def of_rank(x: Any, ids: Any, rows: Any, weights: Any, drows: Any, dy: Any, first: Any, second: Any) -> Any:
            def send(x: Any, first: Any) -> Any:
                arrived = cls().dispatch_matmul(x, ids, first, **setting.rows, **setting.where)
                return arrived.rows, arrived

            _, send_back, arrived = jax.vjp(send, x, first, has_aux=True)
            answer = lambda rows, second, weights: jaxmoe.matmul_combine(rows, second, weights, arrived.handle)  # noqa: E731
            y, transpose = jax.vjp(answer, rows, second, weights if weighted else None)
            return arrived, y, send_back(drows), transpose(dy)

        if not setting.inside:
            return jax.jit(of_rank)
        split, of_experts = P(setting.axes), P(setting.expert_axes)
        specs = (split,) * 6 + (of_experts,) * 2
        outputs = split, split, (split, of_experts), (split, of_experts, split if weighted else None)
        return jax.jit(jax.shard_map(of_rank, mesh=setting.mesh, in_specs=specs, out_specs=outputs))

    def arrays(self, setting: Setting, rows: int) -> Arrays:
        rng, shards = np.random.default_rng(0), setting.groups * setting.ranks

        def whole(*shape: int) -> np.ndarray:
            return rng.integers(-1, 2, shape).astype(np.float32)

        return Arrays(
            x=whole(self.tokens, self.hidden),
            first=whole(EXPERTS, self.hidden, self.inner),
            rows=whole(shards * rows, self.inner),
            second=whole(EXPERTS, self.inner, self.width),
            weights=2.0 ** rng.integers(-1, 2, (self.tokens, TOP_K)).astype(np.float32),
            drows=whole(shards * rows, self.inner),
            dy=whole(self.tokens, self.width),
        )

    def check(self, setting: Setting, ids: np.ndarray, weighted: bool = True) -> None:
        """Holds all results to the model, bit for bit."""
        of_groups = ids.reshape(setting.groups, setting.ranks, -1, TOP_K)
        routed = [exchange_model.route(each, EXPERTS, **setting.rows) for each in of_groups]
        if setting.capacity is not None:
            assert any(each.dropped_rows.any() for each in routed), "no row was dropped: a test of nothing"
        rows, local = routed[0].row_sources.shape[1], EXPERTS // setting.ranks
        arrays = self.arrays(setting, rows)
        nobody = np.concatenate([each.row_sources.reshape(-1) for each in routed])[:, None] < 0
        places = (-1, setting.capacity) if setting.per_expert and setting.capacity else (-1,)

        def given(array: np.ndarray) -> Any:  # rows that are nobody's may hold anything
            if len(array) == len(nobody):
                array = np.where(nobody, np.nan, array).reshape(*places, array.shape[-1])
            return jnp.asarray(array, self.dtype)

        x, in_rows, drows, dy, first, second = map(
            given, (arrays.x, arrays.rows, arrays.drows, arrays.dy, arrays.first, arrays.second)
        )
        weights = jnp.asarray(arrays.weights)
        results = self.program(setting, weighted)(x, jnp.asarray(ids), in_rows, weights, drows, dy, first, second)
        arrived, y, (dx, dfirst), (dh, dsecond, dweights) = results

        def in_groups(array: Any, *shape: int) -> np.ndarray:
            return np.asarray(array, np.float64).reshape(setting.groups, setting.ranks, *shape)

        ones = np.ones(arrays.weights.shape)
        truth_of_weights = in_groups(arrays.weights if weighted else ones, -1, TOP_K)
        # Each group rounds its part of the gradients of matrices, which are then added up.
        dfirst_truth, dsecond_truth = (
            np.zeros((setting.groups, *matrices.shape)) for matrices in (arrays.first, arrays.second)
        )
        for group, each in enumerate(routed):
            used, of_weights = of_groups[group], truth_of_weights[group]
            for name in ("row_sources", "slot_rows", "rows_per_expert", "dropped_rows"):
                value = (
                    getattr(arrived, name) if "expert" in name or "dropped" in name else getattr(arrived.handle, name)
                )
                truth = getattr(each, name)
                np.testing.assert_array_equal(in_groups(value, *truth.shape[1:])[group], truth, name)
            experts = _experts_of_rows(each, used, local)

            def times(rows: np.ndarray, matrices: np.ndarray, experts: np.ndarray = experts) -> np.ndarray:
                products = np.zeros((*rows.shape[:2], matrices.shape[2]))
                for expert, matrix in enumerate(matrices):
                    products[experts == expert] = rows[experts == expert] @ matrix
                return products

            x_rows = exchange_model.rows_of(each, in_groups(arrays.x, -1, self.hidden)[group])
            h = np.where(experts[..., None] < 0, 0, in_groups(arrays.rows, -1, self.inner)[group])
            d_rows = np.where(experts[..., None] < 0, 0, in_groups(arrays.drows, -1, self.inner)[group])
            outputs, d_y = times(h, arrays.second), in_groups(arrays.dy, -1, self.width)[group]
            doutputs, dweights_truth = exchange_model.transposed_sums(each, used, outputs, of_weights, d_y)
            to_x = times(d_rows, arrays.first.swapaxes(1, 2))
            pairs = [
                (arrived.rows, times(x_rows, arrays.first)),
                (y, exchange_model.sums_of(each, used, outputs, of_weights)),
                (dx, exchange_model.sums_of(each, used, to_x, np.ones(used.shape))),
                (dh, times(doutputs, arrays.second.swapaxes(1, 2))),
            ]
            if weighted:
                pairs.append((dweights, dweights_truth))
            for value, truth in pairs:
                assert np.abs(truth).max() > 0 or (experts < 0).all(), "a test of nothing"
                self.assert_equal(in_groups(value, *truth.shape[1:])[group], truth, value.dtype)
            for expert in range(EXPERTS):
                here = experts == expert
                dfirst_truth[group, expert] += x_rows[here].T @ d_rows[here]
                dsecond_truth[group, expert] += h[here].T @ doutputs[here]
        for value, truth in ((dfirst, dfirst_truth), (dsecond, dsecond_truth)):
            parts = np.asarray(jnp.asarray(truth, value.dtype), np.float64)
            self.assert_equal(np.asarray(value, np.float64), parts.sum(0), value.dtype)

    def assert_equal(self, value: np.ndarray, truth: np.ndarray, dtype: Any) -> None:
        np.testing.assert_array_equal(value, np.asarray(jnp.asarray(truth, dtype), np.float64))

    def ids(self, routing: Any = "zipf", seed: int = 1) -> np.ndarray:
        return make_ids(np.random.default_rng(seed), self.tokens, EXPERTS, TOP_K, routing)

    # --- what a loop over ranks and slots says ----------------------------------------------------------------------

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_products_sums_and_gradients_are_those_of_a_loop_over_rows(self, routing):
        self.check(ALIGNED, self.ids(routing))

    @pytest.mark.parametrize("name", SETTINGS)
    def test_the_same_holds_for_every_mesh_and_room(self, name):
        # As many rows as find no room of fewer tokens.
        setting, more = SETTINGS[name], self.tokens // TOKENS
        if setting.capacity:
            setting = dataclasses.replace(setting, capacity=setting.capacity * more)
        if not setting.expert_axes:
            setting = dataclasses.replace(setting, capacity=TOP_K * self.tokens // 2)
        self.check(setting, self.ids(seed=2))

    def test_without_weights_each_is_one(self):
        self.check(ALIGNED, self.ids(seed=3), weighted=False)

    def test_the_same_call_gives_the_same_bits(self):
        rng = np.random.default_rng(4)
        x, first, second, weights = (
            jnp.asarray(rng.standard_normal(shape), dtype)
            for shape, dtype in (
                ((self.tokens, self.hidden), self.dtype),
                ((EXPERTS, self.hidden, self.inner), self.dtype),
                ((EXPERTS, self.inner, self.width), self.dtype),
                ((self.tokens, TOP_K), jnp.float32),
            )
        )
        ids = jnp.asarray(self.ids())

        @jax.jit
        def both(x: Any, first: Any, second: Any, weights: Any) -> Any:
            arrived = self.dispatch_matmul(x, ids, first, alignment=8, **ALIGNED.where)
            return arrived.rows, jaxmoe.matmul_combine(jnp.sin(arrived.rows), second, weights, arrived.handle)

        results = [both(x, first, second, weights) for _ in range(4)]
        for other in results[1:]:
            jax.tree.map(np.testing.assert_array_equal, other, results[0])

    @pytest.mark.parametrize("options", [{"alignment": 4}, {"capacity": 4, "per_expert": True}])
    def test_zero_tokens_give_zero_rows_zero_tokens_and_zero_gradients(self, options):
        x, ids, weights = jnp.zeros((0, self.hidden), self.dtype), jnp.zeros((0, 2), jnp.int32), jnp.ones((0, 2))
        first, second = (
            jnp.ones((EXPERTS, *shape), self.dtype) for shape in ((self.hidden, self.inner), (self.inner, self.width))
        )

        def loss(x: Any, first: Any, second: Any) -> Any:
            arrived = self.dispatch_matmul(x, ids, first, **options, **ALIGNED.where)
            y = jaxmoe.matmul_combine(arrived.rows, second, weights, arrived.handle)
            return y.sum() + arrived.rows.sum(), (y.shape, arrived.rows_per_expert)

        gradients, (shape, counts) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, first, second)
        assert shape == (0, self.width)
        assert not np.asarray(counts).any()
        for gradient in gradients:
            assert not np.asarray(gradient, np.float32).any()

    def test_the_handle_of_a_dispatch_will_do_and_that_of_a_product_for_a_combine(self):
        ids = jnp.asarray(self.ids())
        arrays = self.arrays(ALIGNED, 1)
        x, first = jnp.asarray(arrays.x, self.dtype), jnp.asarray(arrays.first, self.dtype)
        back = first.swapaxes(1, 2)
        options = {"implementation": self.implementation, **ALIGNED.where}
        plain = jaxmoe.dispatch(x, ids, num_experts=EXPERTS, **options)
        multiplied = self.dispatch_matmul(x, ids, first, **ALIGNED.where)
        assert plain.handle.call == multiplied.handle.call
        truth = jaxmoe.matmul_combine(multiplied.rows, back, None, multiplied.handle)
        np.testing.assert_array_equal(jaxmoe.matmul_combine(multiplied.rows, back, None, plain.handle), truth)
        np.testing.assert_array_equal(
            jaxmoe.combine(multiplied.rows, None, plain.handle),
            jaxmoe.combine(multiplied.rows, None, multiplied.handle),
        )

    def test_vmap_raises_and_says_what_to_do(self):
        x, first = jnp.ones((8, self.hidden), self.dtype), jnp.ones((EXPERTS, self.hidden, self.inner), self.dtype)
        ids = jnp.zeros((8, 2), jnp.int32)

        def send(x: Any) -> Any:
            return self.dispatch_matmul(x, ids, first, axis_name=None)

        rows, handle = jax.eval_shape(lambda x: (send(x).rows, send(x).handle), x)
        functions = {
            "dispatch_matmul": (lambda x, handle: send(x).rows, x),
            "matmul_combine": (
                lambda rows, handle: jaxmoe.matmul_combine(rows, first.swapaxes(1, 2), None, handle),
                rows,
            ),
        }
        for name, (function, array) in functions.items():
            told = rf"^{name}: .*dispatch_matmul takes x .*pass the batch dimension along"
            assert_maps_are_refused(function, array, handle, told)


class KernelSuite(MatmulSuite):
    """What compiled kernels have besides: the bits of the layer."""

    implementation = "megakernel"

    @pytest.mark.parametrize("routing", ["zipf", "one-hot", "unused-slots"])
    def test_around_an_activation_that_rounds_nothing_they_have_the_bits_of_the_layer(self, routing):
        """Their products are rounded before the activation, those of the layer after it: the same for relu."""
        sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "gated": False, "dtype": self.dtype}
        x, ids, weights, experts, _ = make_inputs(
            3, tokens=self.tokens, hidden=self.hidden, intermediate=self.inner, routing=routing, **sizes
        )

        @jax.jit
        def both(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
            arrived = self.dispatch_matmul(x, ids, experts.w_gate, alignment=16, **ALIGNED.where)
            y = jaxmoe.matmul_combine(jax.nn.relu(arrived.rows), experts.w_down, weights, arrived.handle)
            options: dict[str, Any] = {"activation": "relu", "implementation": self.implementation, **ALIGNED.where}
            return y, jaxmoe.moe_layer(x, ids, weights, experts, **options)

        y, layer = both(x, ids, weights, experts)
        assert np.asarray(y, np.float32).any()
        np.testing.assert_array_equal(y, layer)


def _experts_of_rows(routed: exchange_model.Routed, ids: np.ndarray, local: int) -> np.ndarray:
    """The expert of every row of every rank, among those of the group; -1 of what is nobody's."""
    experts = np.full(routed.row_sources.shape, -1)
    for (rank, row), source in np.ndenumerate(routed.row_sources):
        if source >= 0:
            experts[rank, row] = ids[source // 2**24].reshape(-1)[source % 2**24]
            assert experts[rank, row] // local == rank
    return experts
