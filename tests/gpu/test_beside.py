"""The layer beside everything else that a program does, in one process with all GPUs.

`JAXMOE_TEST_SECONDS` is the time of each program, 3 where it is not set. A class is one run in a process of its own;
`-k` picks programs and numbers of tokens, such as `-k "loss and 1024"`.
"""

from typing import ClassVar

from tests.gpu.beside_lines import MARKS, BesideSuite

pytestmark = MARKS


class TestInOneProcess(BesideSuite):
    processes = 1


class TestInOneProcessInEightBits(BesideSuite):
    processes = 1
    precision = "fp8"


class TestInOneProcessWithDecodedExperts(BesideSuite):
    """Decoded ahead in 8 bits; in 4 bits, with 64 tokens a rank, in registers."""

    processes = 1
    dtype = "w8a16"


class TestInOneProcessInFourBits(BesideSuite):
    processes = 1
    dtype = "mxfp4-a16"


class TestInOneProcessInRepackedFourBits(BesideSuite):
    processes = 1
    dtype = "mxfp4-a16-repacked"


class TestInOneProcessInFourBitsBesideEight(BesideSuite):
    processes = 1
    dtype = "mxfp4-a8"


class TestInOneProcessInFourBitsThroughEight(BesideSuite):
    """Rounded to E4M3 when experts are made ready; with 8192 tokens a rank decoded ahead."""

    processes = 1
    dtype = "nvfp4-a8"


class TestInOneProcessOverHosts(BesideSuite):
    """Of one GPU each: all tokens are gathered in two chunks, whose collectives XLA runs beside the kernels."""

    processes = 1
    network: ClassVar = {"ranks_per_host": 1, "way": "gather", "chunks": 2}
