"""Whether any layer has failed, as a program asks before it keeps something."""

import subprocess
import sys
import types

import pytest

import jaxmoe
from jaxmoe import native

FAILURE = "jaxmoe: rank 3 sm 41 gate_up waited 600 s for rows_arrived[17]: seen 96 of 256."


@pytest.fixture
def failed(monkeypatch):
    """A process in which a layer on GPUs has failed, as the compiled part tells it."""
    module = types.SimpleNamespace(failures=lambda: [FAILURE], untold_failures=lambda: [FAILURE])
    monkeypatch.setitem(sys.modules, "jaxmoe._cuda", module)


@pytest.mark.usefixtures("failed")
def test_a_failure_is_told_and_raised():
    assert jaxmoe.failures() == (FAILURE,)
    with pytest.raises(jaxmoe.LayerFailedError, match=r"waited 600 s for rows_arrived[\s\S]*Restart all processes"):
        jaxmoe.raise_if_failed()


@pytest.mark.slow
def test_nothing_fails_where_nothing_was_loaded_and_asking_loads_nothing():
    code = "import sys, jaxmoe; jaxmoe.raise_if_failed(); print(jaxmoe.failures(), 'jaxmoe._cuda' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout == "() False\n"


@pytest.mark.usefixtures("failed")
def test_what_nobody_was_told_is_printed_when_the_process_ends(capsys):
    native._report_untold_failures()
    assert FAILURE in capsys.readouterr().err
