"""Every test runs on 8 virtual CPU devices, with the shapes in jaxmoe's signatures checked at every call."""

import gc
import os
from pathlib import Path

import jaxtyping

# Before jaxmoe is imported, so that all its functions are checked.
jaxtyping.install_import_hook("jaxmoe", "beartype.beartype")

if os.environ.get("JAXMOE_TEST_DEVICES") != "gpu":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # What has been compiled is not compiled again, neither by commands that tests start nor in the next run. A folder
    # for each test process, since JAX's cache has no locks.
    cache = Path(__file__).parents[1] / ".pytest_cache" / f"xla-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

from jaxmoe import testing  # noqa: E402

testing.use_virtual_devices(8)

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests import selection  # noqa: E402

# Compiling takes longer than hypothesis' default deadline; the examples are the same in every run.
settings.register_profile(
    "jaxmoe", deadline=None, derandomize=True, max_examples=20, suppress_health_check=[HealthCheck.differing_executors]
)
settings.load_profile("jaxmoe")

# Their assertions say the values that they compared, as those of test files do.
pytest.register_assert_rewrite("tests.unit.flax_layers", "tests.unit.layout_model")


# Files that take longest. Processes share the tests by files, in the order in which they come here (the Makefile's
# --no-loadscope-reorder): a long one that came last would run while the other processes have nothing to do.
LONGEST_FIRST = (
    *("unit/test_bench.py", "unit/test_bench_beside.py", "unit/test_bench_backward.py", "unit/test_xla.py"),
    *("unit/test_bench_in_8_bits.py", "host/test_thread_sanitizer.py", "unit/test_fp8.py", "unit/test_demo.py"),
    *("host/test_kernel_code.py", "unit/test_layers.py", "host/test_executor.py", "host/test_megakernel.py"),
    "notebooks/test_notebooks.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="run the first of each N tests of a file, in their order"
    )
    parser.addoption(
        "--cases", type=int, default=1, metavar="N", help="run one of each N cases of a test, and at least one"
    )
    parser.addoption("--turn", type=int, default=0, metavar="T", help="which one: T, T + N, ... of them, and so around")


def pytest_report_header(config: pytest.Config) -> str | None:
    cases, turn = (int(config.getoption(name) or 0) for name in ("--cases", "--turn"))
    return f"of the cases of a test one of {cases}: --cases={cases} --turn={turn % cases}" if cases > 1 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests out where an option asks for few; skips those of GPUs where JAX has none, and says so."""
    every, cases, turn = (int(config.getoption(name) or 0) for name in ("--every", "--cases", "--turn"))
    kept = selection.of_every(items, every) if every > 1 else items
    kept = selection.of_cases(kept, cases, turn) if cases > 1 else kept
    if kept is not items:
        left = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = kept
    order = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    if any("gpu" in item.keywords for item in items):
        found = [device.device_kind for device in jax.devices()]
        if jax.default_backend() != "gpu":
            skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU (JAXMOE_TEST_DEVICES=gpu); JAX has {found[0]}")
            for item in items:
                if "gpu" in item.keywords:
                    item.add_marker(skip)


# What JAX keeps of all programs that were compiled before makes a full collection take seconds; the benchmark asks for
# one after each line. Set aside after every test, it is looked through once: a quarter of the time of all tests.
gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def unchecked_shapes():
    """Turns the shape checks of jaxtyping off, to see the errors that users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
