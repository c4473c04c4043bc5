"""Ranks of the benchmark: `python -m jaxmoe.bench layer` in several processes, as its flags start them.

argument 1   "flags": the program; "clock": `time_blocks` alone, in processes of different speed
"""

import os
import sys
import time

import jax.numpy as jnp

from tests.multiprocess.rank import join, step, this_rank


def flags() -> None:
    rank = this_rank()
    step(f"pid {os.getpid()}")
    sys.argv = [
        "bench",
        "layer",
        f"--coordinator={rank.coordinator}",
        f"--processes={rank.processes}",
        f"--process={rank.index}",
        f"--ep={rank.processes * rank.devices}",
        "--shape=24,16,24,8,2",
        "--implementation=megakernel,xla,baseline-drops-rows",
        "--blocks=2",
        "--seconds=0.01",
        "--terms",
    ]
    from jaxmoe.bench.__main__ import main

    main()


def clock() -> None:
    rank = join()
    from jaxmoe.bench.timing import time_blocks

    def call(_: int) -> object:
        time.sleep(0.001 + 0.01 * rank.index)
        return jnp.zeros(())

    step(f"microseconds {[round(1e6 * seconds) for seconds in time_blocks(call, blocks=3, seconds=0.1)]}")


if __name__ == "__main__":
    {"flags": flags, "clock": clock}[sys.argv[1]]()
