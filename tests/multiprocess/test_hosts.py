"""What `implementation=None` chooses where a job has several hosts."""

import pytest

from tests.multiprocess.launcher import launch

pytestmark = pytest.mark.multiprocess

MEGAKERNEL = "implementation=None: 'megakernel', which can run this call"
UNKNOWN = "implementation=None: 'xla'; there are devices of 2 hosts, "
# What each case of the worker is told.
CHOICES = {
    "groups within hosts": MEGAKERNEL,
    "groups across hosts": MEGAKERNEL,
    "all devices": MEGAKERNEL,
    "no groups": MEGAKERNEL,
    "groups within hosts, set, in jit": MEGAKERNEL,
    "groups within hosts, in shard_map": UNKNOWN,
    "groups within hosts, in shard_map, passed": MEGAKERNEL,
    "groups across hosts, set, in jit": MEGAKERNEL,
    "groups across hosts, in shard_map": UNKNOWN,
    "groups across hosts, in shard_map, passed": MEGAKERNEL,
}
# Of the groups across hosts: hosts, and ranks on each.
LEVELS = {
    "groups across hosts": (2, 1),
    "all devices": (2, 2),
    "groups across hosts, set, in jit": (2, 1),
    "groups across hosts, in shard_map, passed": (2, 1),
}


def assert_all_are_told(output: str) -> None:
    told = dict(line.split(": ", 1) for line in output.splitlines() if ": implementation=None: " in line)
    assert told.keys() == CHOICES.keys()
    for case, reason in CHOICES.items():
        assert told[case].startswith(reason), case
        of_hosts = f" [{LEVELS[case][0]} hosts x {LEVELS[case][1]} ranks]" if case in LEVELS else " [one level]"
        assert told[case].endswith(of_hosts), case


@pytest.mark.slow
def test_groups_get_the_megakernel_and_those_across_hosts_levels_where_hosts_are_known_in_all_processes_alike():
    outputs = launch(
        "tests.multiprocess.workers.hosts", processes=4, devices_per_process=1, timeout_s=200, silence_s=120
    )
    if "cannot look like another host" in outputs[0]:
        pytest.skip(outputs[0].strip())
    for output in outputs:
        assert_all_are_told(output)
