"""Every notebook, executed as a reader would: in a fresh kernel of this interpreter, on virtual CPU devices.

The notebooks carry their outputs, so that they read on the web. `python -m tests.notebooks.test_notebooks`, started in
the root of the repository, executes them and writes these outputs.
"""

import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TWENTY_LINES = ROOT / "notebooks" / "moe_in_twenty_lines.ipynb"
FEW_BITS = ROOT / "notebooks" / "experts_in_few_bits.ipynb"
CHECKPOINT = ROOT / "notebooks" / "load_a_checkpoint.ipynb"
TRAINING = ROOT / "notebooks" / "train_a_tiny_moe.ipynb"
OWN_EXPERTS = ROOT / "notebooks" / "experts_of_your_own.ipynb"

CELL_SECONDS = 120
MAX_BYTES = 200_000
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")

# Runs before the notebook's own cells. ipykernel itself need not be free of warnings: it has started by then, and is
# left out for the time when it ends.
WARNINGS_ARE_ERRORS = """
import sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="ipykernel")
print(sys.executable)
"""


class ThisInterpreter(KernelSpecManager):
    """Starts kernels of the interpreter that runs the tests, whatever kernels are registered on the machine."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Executes the cells of a notebook in place.

    Args:
      notebook: of which the code cells get outputs.
      folder: empty, for everything that is written.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
      nbclient.exceptions.CellTimeoutError: a cell took longer than `CELL_SECONDS`.
    """
    # The process of the tests has set these, a reader has not: the size of XLA's thread pool, and how plots are shown.
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "MPLBACKEND")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder)}
    # Sockets in the folder rather than TCP ports, which a kernel warns about since it does not encrypt them.
    manager = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=ThisInterpreter(),
        transport="ipc",
        connection_file=str(folder / "kernel.json"),
    )
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment, cleanup_kc=True)  # else the kernel of a manager that is passed in lives on


@functools.cache
def executed(path: Path) -> NotebookNode:
    """Returns the notebook as it ran with warnings as errors, behind a first cell that is not its own."""
    notebook: Any = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(WARNINGS_ARE_ERRORS))
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> Iterator[Any]:
    return (output for cell in code_cells(notebook) for output in cell.outputs)


def text(notebook: Any, stream: str = "stdout") -> str:
    return "".join(output.text for output in outputs(notebook) if output.get("name") == stream)


def has_plot(notebook: Any) -> bool:
    return any("image/png" in output.get("data", {}) for output in outputs(notebook))


def num_lines(cells: list[Any]) -> int:
    return sum(bool(line.strip()) for cell in cells for line in cell.source.splitlines())


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def committed(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_the_notebooks_of_these_tests_are_found():
    assert {TWENTY_LINES, TRAINING, FEW_BITS, CHECKPOINT, OWN_EXPERTS} <= set(NOTEBOOKS)


@pytest.mark.slow
def test_every_cell_runs_in_a_fresh_kernel_of_this_interpreter_without_errors_or_warnings(path):
    notebook = executed(path)
    interpreter, *cells = code_cells(notebook)
    assert interpreter.outputs[0].text.strip() == sys.executable
    assert [cell.execution_count for cell in cells] == list(range(2, len(cells) + 2))
    assert all(output.output_type != "error" for output in outputs(notebook))
    assert "Warning" not in text(notebook) + text(notebook, "stderr")
    assert has_plot(notebook)


@pytest.mark.slow
def test_the_outputs_in_the_file_are_those_of_a_run(path, committed):
    written, found = text(committed), text(executed(path)).removeprefix(f"{sys.executable}\n")
    stale = "The outputs in the notebook are stale: python -m tests.notebooks.test_notebooks"
    assert NUMBER.sub("0", written) == NUMBER.sub("0", found), stale
    # The last digits are those of one machine and one version of XLA.
    numbers = [np.array([float(number) for number in NUMBER.findall(side)]) for side in (written, found)]
    np.testing.assert_allclose(*numbers, rtol=0.2, err_msg=stale)
    assert has_plot(committed)


def test_the_file_is_small_and_holds_nothing_of_the_machine_that_wrote_it(path, committed):
    content = path.read_text()
    assert len(content.encode()) < MAX_BYTES
    assert committed.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert all(cell.metadata == {} for cell in committed.cells)
    cells = code_cells(committed)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not text(committed, "stderr")
    shown = re.sub(r'"image/png": ".*"', "", content)
    assert not re.search(r"/(home|root|tmp|usr|work|Users)/|object at 0x|Warning", shown)


def test_twenty_lines_are_about_twenty_lines():
    notebook: Any = nbformat.read(TWENTY_LINES, as_version=4)
    extras = [cell for cell in code_cells(notebook) if cell.id in ("plot", "error")]
    layer = [cell for cell in code_cells(notebook) if cell not in extras]
    claim = f"take {num_lines(layer)} lines; {num_lines(extras)} more"
    assert claim in notebook.cells[0].source
    assert num_lines(layer) <= 25
    assert num_lines(code_cells(notebook)) <= 37


@pytest.mark.slow
def test_the_steps_of_the_notebook_balance_the_load():
    match = re.search(r"over the mean: ([\d.]+) before, ([\d.]+) after", text(executed(TWENTY_LINES)))
    assert match
    before, after = map(float, match.groups())
    assert before > 2.5
    assert after < 1.25


@pytest.mark.slow
def test_the_training_of_the_notebook_learns_the_language_alike_through_both_implementations():
    printed = text(executed(TRAINING))
    (guessing, floor), *ends = (
        tuple(map(float, match))
        for pattern in (r"guessing: ([\d.]+) nats, .* language: ([\d.]+)", r"step ([\d.]+), .* last ten ([\d.]+)")
        for match in re.findall(pattern, printed)
    )
    assert len(ends) == 2
    for start, end in ends:
        assert start > 0.9 * guessing
        assert end < 1.25 * floor
    assert "less than 0.0001 apart at every step: True" in printed
    assert "{'jaxmoe_forward': 1, 'jaxmoe_backward': 1}" in printed


@pytest.mark.slow
def test_the_notebook_of_few_bits_shows_what_it_says_of_them():
    printed = text(executed(FEW_BITS))
    bits, weights = zip(
        *(
            map(float, match)
            for match in re.findall(r"([\d.]+) bits a weight, +([\d.]+) % error of the weights", printed)
        ),
        strict=True,
    )
    assert list(bits) == pytest.approx([16, 8 + 32 / 128**2, 8 + 32 * 5 / (3 * 512), 4.25, 4.5], abs=2e-3)
    bf16, blocks, channels, mxfp4, nvfp4 = weights
    assert bf16 < 1 < channels < blocks < 5 < nvfp4 < mxfp4 < 20
    tokens_too, tokens_wide, mx_tokens_too, mx_tokens_wide, nv_tokens_too, nv_tokens_wide = map(
        float, re.findall(r"([\d.]+) % error of the output", printed)
    )
    assert tokens_wide < 0.8 * tokens_too
    assert mx_tokens_wide < mx_tokens_too < 1.05 * mx_tokens_wide
    assert nv_tokens_wide < nv_tokens_too < 1.1 * nv_tokens_wide


@pytest.mark.slow
def test_the_notebook_of_a_checkpoint_computes_and_writes_what_transformers_does_and_shows_what_formats_cost():
    printed = text(executed(CHECKPOINT))
    assert "transformers by less than 0.0001: True" in printed
    assert "as transformers writes: True" in printed
    found = re.findall(r"(\w+): ([\d.]+) of the bytes of BF16, ([\d.]+) % error", printed)
    names, sizes, errors = zip(*((name, float(size), float(error)) for name, size, error in found), strict=True)
    assert names == ("FP8", "NVFP4", "MXFP4")
    assert sizes == pytest.approx([0.5, 4.5 / 16, 4.25 / 16], abs=0.01)
    assert 0 < errors[0] < errors[1] < errors[2] < 20


@pytest.mark.slow
def test_the_notebook_of_experts_of_ones_own_trains_adapters_between_dispatch_and_combine():
    printed = text(executed(OWN_EXPERTS))
    assert "without room: 0" in printed
    assert "equal to moe_layer but for rounding: True" in printed
    before, after = map(float, re.findall(r"([\d.]+) before, ([\d.]+) after", printed)[0])
    assert after < before / 8
    assert 0 < float(re.findall(r"([\d.]+) % off", printed)[0]) < 5


def main() -> None:
    """Executes every notebook and writes its outputs."""
    for path in NOTEBOOKS:
        notebook: Any = nbformat.read(path, as_version=4)
        metadata = dict(notebook.metadata)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        # The kernel adds the version of its Python.
        notebook.metadata = nbformat.from_dict(metadata | {"language_info": {"name": "python"}})
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
