"""What `implementation=None` chooses where a job has several hosts."""

import pytest

from tests.multiprocess.launcher import launch

pytestmark = pytest.mark.multiprocess

MEGAKERNEL = "implementation=None: 'megakernel', which can run this call"
OF_TWO = "implementation=None: 'xla'; a group of ranks has devices of 2 hosts, "
UNKNOWN = "implementation=None: 'xla'; there are devices of 2 hosts, "
# What each case of the worker is told.
CHOICES = {
    "groups within hosts": MEGAKERNEL,
    "groups across hosts": OF_TWO,
    "all devices": OF_TWO,
    "no groups": MEGAKERNEL,
    "groups within hosts, set, in jit": MEGAKERNEL,
    "groups within hosts, in shard_map": UNKNOWN,
    "groups within hosts, in shard_map, passed": MEGAKERNEL,
    "groups across hosts, set, in jit": OF_TWO,
    "groups across hosts, in shard_map": UNKNOWN,
    "groups across hosts, in shard_map, passed": OF_TWO,
}


def assert_all_are_told(output: str) -> None:
    told = dict(line.split(": ", 1) for line in output.splitlines() if ": implementation=None: " in line)
    assert told.keys() == CHOICES.keys()
    for case, reason in CHOICES.items():
        assert told[case].startswith(reason), case


def test_groups_within_hosts_get_the_megakernel_and_groups_across_hosts_do_not_in_all_processes_alike():
    outputs = launch(
        "tests.multiprocess.workers.hosts", processes=4, devices_per_process=1, timeout_s=200, silence_s=120
    )
    if "cannot look like another host" in outputs[0]:
        pytest.skip(outputs[0].strip())
    for output in outputs:
        assert_all_are_told(output)
