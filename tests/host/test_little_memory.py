"""What a call of compiled code on a CPU says where memory or threads run out, and that the process goes on.

A process of its own for each test, whose address space is limited. Stacks of threads count as address space too: of
large ones glibc keeps none for later, so that room for so many of them is room for so many threads.
"""

import os
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MIB = 1 << 20
TIMEOUT_SECONDS = 100  # of waits; no test takes that long

PRELUDE = """
import gc
import resource

from jaxmoe import testing

testing.use_virtual_devices(2)
import jax
import jax.numpy as jnp

import jaxmoe

MIB = 1 << 20
mesh = jax.make_mesh((2,), ("expert",))


def limit(room=None):
    gc.collect()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most if room is None else used + room, most))


def run_in(room, program, *arguments):
    limit(room)
    try:
        jax.block_until_ready(program(*arguments))
        print("nothing went wrong", flush=True)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        print(str(error).replace(chr(10), " "), flush=True)
    limit()


def compile(function, *arguments):
    program = jax.jit(function).lower(*arguments).compile()
    return program, jax.block_until_ready(jax.device_put(arguments, program.input_shardings[0]))


"""


def lines_of(code: str, stack_bytes: int) -> list[str]:
    """What a program prints, whose threads have stacks of this size."""
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if most != resource.RLIM_INFINITY and most < stack_bytes:
        pytest.skip(f"needs threads with stacks of {stack_bytes} bytes; the limit of this machine is {most}")
    # One heap for all threads, and large blocks given back: else what there is room for depends on timing.
    fixed = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    program = PRELUDE + textwrap.dedent(code)
    started = time.monotonic()
    result = subprocess.run(
        ["sh", "-c", 'ulimit -S -s "$0" && exec "$@"', str(stack_bytes // 1024), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, **fixed, "JAX_PLATFORMS": "cpu", "JAXMOE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS)},
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - started < TIMEOUT_SECONDS, "nobody waits for a rank that cannot go on"
    return result.stdout.splitlines()


def test_arenas_without_memory_are_an_error_of_all_ranks_and_the_next_call_runs():
    """Answers take 32 times as much memory as tokens."""
    code = """
        tokens, top_k, hidden = 1 << 15, 32, 64
        arguments = (
            jnp.ones((tokens, hidden)),
            jnp.full((tokens, top_k), -1, jnp.int32),
            jnp.ones((tokens, top_k)),
            jaxmoe.Experts.init(jax.random.key(0), num_experts=32, hidden=hidden, intermediate=1),
        )
        program, arguments = compile(
            lambda *of: jaxmoe.moe_layer(*of, mesh=mesh, implementation="megakernel"), *arguments
        )
        run_in(96 * MIB, program, *arguments)
        run_in(None, program, *arguments)
    """
    refused, later = lines_of(code, stack_bytes=MIB)
    assert "could not go on: no memory for arenas of" in refused
    assert "for each of 2 ranks: std::bad_alloc" in refused
    assert later == "nothing went wrong"


def test_a_thread_that_cannot_begin_is_an_error_of_the_call_and_the_next_call_runs():
    code = """
        arguments = (
            jnp.ones((64, 64)),
            jnp.arange(128, dtype=jnp.int32).reshape(64, 2) % 4,
            jnp.ones((64, 2)),
            jaxmoe.Experts.init(jax.random.key(0), num_experts=4, hidden=64, intermediate=32),
        )
        program, arguments = compile(
            lambda *of: jaxmoe.moe_layer(*of, mesh=mesh, implementation="megakernel"), *arguments
        )
        run_in(None, program, *arguments)
        for threads in range(6):
            run_in((64 * threads + 32) * MIB, program, *arguments)
        run_in(None, program, *arguments)
    """
    before, *refused, later = lines_of(code, stack_bytes=64 * MIB)
    assert (before, later) == ("nothing went wrong", "nothing went wrong")
    assert len(refused) == 6
    for error in refused:
        assert "could not go on: " in error
        assert "Resource temporarily unavailable" in error


def test_what_a_thread_of_a_rank_throws_is_an_error_of_the_call_and_the_next_call_runs():
    """Of a token so wide that there is room for the result, but not for the sum that it is made of."""
    code = """
        x, ids = jnp.ones((1, 4 * MIB)), jnp.zeros((1, 1), jnp.int32)
        where = {"num_experts": 1, "axis_name": None, "implementation": "megakernel"}
        sent = jaxmoe.dispatch(x, ids, **where)
        program, arguments = compile(lambda rows, handle: jaxmoe.combine(rows, None, handle), sent.rows, sent.handle)
        run_in(None, program, *arguments)
        run_in(24 * MIB, program, *arguments)
        run_in(None, program, *arguments)
    """
    before, refused, later = lines_of(code, stack_bytes=MIB)
    assert (before, later) == ("nothing went wrong", "nothing went wrong")
    assert "rank 0 could not go on: std::bad_alloc" in refused
