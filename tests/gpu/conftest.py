"""What tests on GPUs share besides what all tests do."""

import pytest

from tests.gpu.beside_lines import Lines, selected


@pytest.fixture(scope="class")
def lines(request):
    """The results of one run of the programs that a subclass of `BesideSuite` is about."""
    suite = request.cls
    return Lines(suite, selected(request.session, suite))
