"""What has to hold of sums at experts (`KernelPlan.sum_at_experts`) on CPUs and GPUs. A test class inherits it."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import native
from jaxmoe.implementations.base import Shape
from jaxmoe.implementations.megakernel.schedule import schedule_of
from jaxmoe.testing import ROUTING_KINDS
from tests.fp8_suite import in_8_bits
from tests.layer_calls import SIZES, SUMS, LayerChecks, layer, mesh_of
from tests.quantized_layer import QuantizedChecks, assert_as_exact

# Other rings, chunks and order of the work.
OTHERS: tuple[dict[str, Any], ...] = (
    {"keep_tokens": True, "chunk_rows": 3},
    {"unit_tiles": 1, "lag_units": 3},
    {"ring_tiles": 99},
)


def summed_tiles(platform: str, **sizes: Any) -> int:
    """Row tiles of a rank whose answers such a plan adds up there, with the sizes of a rank."""
    shape = Shape(**(SIZES | sizes))
    return schedule_of(shape, platform, SUMS).summed_tiles


class SumsSuite(LayerChecks):
    """Inherit and set `platform`, and a placement in which a group has several ranks wherever there are two devices.

    `larger` are sizes with several tokens for each of a GPU's warps.
    """

    implementation = "megakernel"
    platform: ClassVar[str]
    placement: ClassVar[str] = "all devices"
    larger: ClassVar[dict[str, Any]] = {}

    # One rank gets all rows of a one-hot routing, more than it has room for: some answers travel on their own.
    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_output_and_gradients_equal_the_reference_for_every_routing(self, routing):
        self.check(
            self.inputs(50, routing=routing, biases=True, token_valid=True, **self.larger), self.placement, plan=SUMS
        )

    @pytest.mark.parametrize("routing", ["zipf", "one-hot", "unused-slots"])
    def test_every_plan_with_such_sums_gives_the_same_bits_in_every_call(self, routing):
        arguments = self.inputs(52, routing=routing, dtype=jnp.bfloat16, **self.larger)
        expected = self.run(arguments, self.placement, plan=SUMS)
        for changes in ({}, *OTHERS):
            plan = dataclasses.replace(SUMS, **changes)
            np.testing.assert_array_equal(self.run(arguments, self.placement, plan=plan), expected)

    @pytest.mark.skipif(jax.device_count() < 2, reason="without peers nothing changes")
    def test_sums_are_rounded_rank_by_rank(self):
        """With one slot of a token on each rank sums are answers; with more of them they have other bits."""
        arguments = self.inputs(53, dtype=jnp.bfloat16, **self.larger)
        run = lambda a, plan: np.asarray(self.run(a, self.placement, plan=plan))  # noqa: E731
        assert (run(arguments, SUMS) != run(arguments, None)).any()
        one_slot = arguments._replace(topk_ids=arguments.topk_ids.at[:, 1:].set(-1))
        np.testing.assert_array_equal(run(one_slot, SUMS), run(one_slot, None))

    def test_without_peers_nothing_changes(self):
        arguments = self.inputs(54, dtype=jnp.bfloat16)
        np.testing.assert_array_equal(
            self.run(arguments, "one rank", plan=SUMS), self.run(arguments, "one rank", plan=None)
        )
        assert summed_tiles(self.platform, ranks=1) == 0

    def test_there_is_room_for_more_than_the_rows_of_a_balanced_rank(self):
        ranks, tile_rows = 4, native.schedule().granularity(self.platform, True).tile.rows
        balanced = SIZES["tokens"] * SIZES["top_k"]
        rows = summed_tiles(self.platform, ranks=ranks) * tile_rows
        assert 1.25 * balanced <= rows < 1.25 * balanced + (SIZES["num_experts"] // ranks + 1) * tile_rows


class SumsInEightBitsSuite(QuantizedChecks):
    """The same with tokens in 8 bits; answers travel in 16."""

    implementation = "megakernel"
    placement: ClassVar[str] = "all devices"

    @pytest.mark.parametrize("routing", ["uniform", "one-hot"])
    def test_sums_of_8_bits_are_as_exact(self, routing):
        arguments = in_8_bits(self.inputs(55, biases=True, routing=routing))
        assert_as_exact(self.run(arguments, self.placement, plan=SUMS), arguments)


def scanned(arguments: Any, layers: int) -> Any:
    """As many layers back to back, each on what the one before has returned, all with sums at experts."""
    run = layer("all devices", implementation="megakernel", plan=SUMS)

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = run(arguments._replace(x=x)).astype(jnp.float32)
        return jnp.clip(x.astype(jnp.float32) / 2 + y, -2, 2).astype(x.dtype), None

    placed = jax.NamedSharding(mesh_of("expert"), jax.P("expert"))
    return jax.lax.scan(step, jax.device_put(arguments.x, placed), None, length=layers)[0]
