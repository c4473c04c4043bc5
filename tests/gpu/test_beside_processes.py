"""The layer beside everything else that a program does, with one process for each GPU.

`JAXMOE_TEST_SECONDS` is the time of each program, 3 where it is not set. One run serves all tests; `-k` picks programs
and numbers of tokens, such as `-k "loss and 1024"`. A failure of one process ends the run: the others wait for it.
"""

from typing import ClassVar

from tests.gpu.beside_lines import GPUS, MARKS, BesideSuite

pytestmark = MARKS


class TestWithAProcessForEachGpu(BesideSuite):
    processes = GPUS


class TestWithAProcessForEachHost(BesideSuite):
    """Of one GPU each: rounds of tokens travel beside the kernel, in a loop."""

    processes = GPUS
    network: ClassVar = {"ranks_per_host": 1, "way": "send"}
