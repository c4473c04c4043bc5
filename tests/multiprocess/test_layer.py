"""The layer over expert groups that span processes: what virtual devices of one process cannot show."""

import json
import re
from collections import defaultdict

import pytest

from jaxmoe.testing import ROUTING_KINDS
from tests.multiprocess.launcher import launch
from tests.multiprocess.workers.layer import CALLS

pytestmark = pytest.mark.multiprocess

# Seconds; a rank prints nothing while it compiles, with all cores taken by other tests.
TIMEOUT_S, SILENCE_S = 270, 120
# Whose groups have ranks in both processes, and whose experts have replicas in both.
MESH = "data 2 x expert 4"


@pytest.mark.slow
@pytest.mark.parametrize("network", [None, {"ranks_per_host": 2, "way": "send", "round_tokens": 3}])
def test_every_process_gets_the_output_and_gradients_of_the_reference_with_the_same_bits_each_time(network):
    outputs = launch(
        "tests.multiprocess.workers.layer",
        processes=2,
        devices_per_process=4,
        arguments=(MESH, "xla", *([json.dumps(network)] if network else [])),
        timeout_s=TIMEOUT_S,
        silence_s=SILENCE_S,
    )
    digests: defaultdict[str, list[str]] = defaultdict(list)
    in_processes: defaultdict[str, set[int]] = defaultdict(set)
    for rank, output in enumerate(outputs):
        assert f"{CALLS} calls gave the same bits" in output
        assert "sums that lie with several processes are not read outside" in output
        for kind in ROUTING_KINDS:
            line = rf"^{kind}: (\d+) shards near the reference, passes of the ranks \[([\d, ]+)\]$"
            found = re.search(line, output, re.M)
            assert found
            # At least the output, eight gradients and the counts on each of this process' four devices.
            assert int(found[1]) >= 4 * (1 + 8 + 1)
            passes = [int(number) for number in found[2].split(", ")]
            assert len(passes) == 8
            if kind in ("zipf", "one-hot") and network is None:
                assert max(passes) > 2
                assert len(set(passes)) > 1
        for shard, digest in re.findall(r"^digest (.+) ([0-9a-f]{64})$", output, re.M):
            digests[shard].append(digest)
            in_processes[shard].add(rank)

    assert {shard for shard, found in digests.items() if len(set(found)) > 1} == set()
    replicated = [shard for shard, ranks in in_processes.items() if len(ranks) == 2]
    assert any("counts" in shard for shard in replicated)
    assert any("w_gate" in shard for shard in replicated)
