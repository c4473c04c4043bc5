"""The way to a worker's tasks as a GPU walks it, without a GPU: it finds the tasks that the host finds."""

import subprocess

import pytest

from tests.host import programs

SOURCES = ["tests/host/task_walk_test.cc"]


def printed(program) -> list[str]:
    return subprocess.run([program], capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def on_host(tmp_path_factory) -> list[str]:
    return printed(programs.build(tmp_path_factory.mktemp("host") / "walk", SOURCES))


@pytest.mark.parametrize("ulps", [-2, 0, 2])
def test_quotients_that_a_gpu_rounds_find_the_same_tasks_of_every_pass(on_host, tmp_path, ulps):
    options = ["-D__CUDA_ARCH__=900", f"-DULPS={ulps}"]
    on_gpu = printed(programs.build(tmp_path / "walk", SOURCES, options))
    assert len(on_host) == 1 + 5 * 300
    assert on_gpu[0] == "quotients 0"
    assert on_gpu == on_host
