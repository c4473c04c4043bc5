"""A checkpoint that several processes load: each reads the experts of its own devices and no others."""

import re

import pytest
from safetensors.numpy import save_file

from tests.multiprocess.launcher import launch
from tests.unit.checkpoints import CASES, LAYER

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_each_process_reads_its_own_experts_and_together_they_have_all(tmp_path):
    tensors = CASES["mixtral"]().tensors
    save_file(tensors, tmp_path / "model.safetensors")
    outputs = launch(
        "tests.multiprocess.workers.convert",
        processes=2,
        devices_per_process=4,
        arguments=(str(tmp_path), str(LAYER)),
        timeout_s=270,
        silence_s=120,
    )
    every = []
    for output in outputs:
        own, read = (
            {int(number) for number in re.findall(r"\d+", re.findall(rf"^{what}: \[(.*)\]$", output, re.M)[0])}
            for what in ("experts of this process", "experts read")
        )
        assert len(own) == 4
        assert own == read
        every += own
        assert "is spread over several processes, of which this one has a part. Gather it first" in output
        assert f"{len(tensors) - 1} tensors came back" in output
    assert sorted(every) == list(range(8))
