"""Sums at experts on a CPU, wherever a layer is called."""

import pytest

from tests.layer_calls import PLACEMENTS, SUMS
from tests.sums_at_experts_suite import SumsInEightBitsSuite, SumsSuite


class TestSums(SumsSuite):
    platform = "cpu"
    placement = "data x expert, Auto"

    @pytest.mark.parametrize("placement", PLACEMENTS)
    def test_output_and_gradients_equal_the_reference_wherever_it_is_called(self, placement):
        self.check(self.inputs(51, routing="zipf", biases=True), placement, plan=SUMS)


class TestSumsInEightBits(SumsInEightBitsSuite):
    placement = "data x expert, Auto"
