"""`python -m jaxmoe.bench layer [flags]`, `scan`, `exchange`, `beside` (with flags as well), `peaks` or `scaling`."""

import os
import sys

from absl import app, flags

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "With several processes: host:port at which the first one waits for the others."
)
_PROCESSES = flags.DEFINE_integer(
    "processes", 1, "How many are started, with the same flags but for --process.", lower_bound=1
)
_PROCESS = flags.DEFINE_integer(
    "process",
    0,
    "Which of them this is, from 0. Its GPUs are those of the environment variable JAX_LOCAL_DEVICE_IDS, not of "
    "CUDA_VISIBLE_DEVICES: it must see those of its peers.",
    lower_bound=0,
)


def _run(argv: list[str]) -> None:
    from jaxmoe.bench import beside, command_line, exchange, layer, peaks, products, report, scaling, scan
    from jaxmoe.implementations.megakernel.launching import TIMEOUT_VARIABLE

    if argv[1:] not in (["layer"], ["scan"], ["exchange"], ["beside"], ["peaks"], ["scaling"]):
        given = " ".join(argv[1:]) or "nothing"
        raise app.UsageError(
            "name what to measure: python -m jaxmoe.bench layer [flags], scan [flags], exchange [flags], beside "
            f"[flags], peaks or scaling; got {given}."
        )
    if argv[1] == "scaling":
        sys.exit(scaling.main())
    try:
        if argv[1] == "peaks":
            cases, ranks = command_line.products_from_flags()
            products.check(cases, ranks)
            times = command_line.SECONDS.value, command_line.REST.value
            sys.exit(peaks.main(*times) or products.main(cases, *times, ranks))
        if argv[1] == "beside":
            os.environ.setdefault(TIMEOUT_VARIABLE, str(beside.TIMEOUT_SECONDS))
            chosen = command_line.beside_from_flags()
            _join(chosen.ranks)
            report.open_first(chosen.json)
            status = beside.run(chosen)
        elif argv[1] == "exchange":
            chosen = command_line.exchange_from_flags()
            _join(chosen.ranks)
            report.open_first(chosen.json)
            status = exchange.run(chosen)
        elif argv[1] == "scan":
            chosen = command_line.scan_from_flags()
            _join(chosen.ranks)
            report.open_first(chosen.json)
            status = scan.run(chosen)
        else:
            chosen = command_line.from_flags()
            _join(max(chosen.ranks))
            report.open_first(chosen.json)
            status = layer.run(chosen)
    except ValueError as error:
        sys.exit(f"jaxmoe bench: {error}")
    sys.exit(status)


def _join(ranks: int) -> None:
    """Makes this process one of several, and its CPU, which stays unused where there are GPUs, as many devices."""
    import jax

    from jaxmoe.testing import use_virtual_devices

    use_virtual_devices(max(ranks // _PROCESSES.value, 1))
    if _PROCESSES.value > 1:
        if _COORDINATOR.value is None or _PROCESS.value >= _PROCESSES.value:
            raise ValueError(
                f"--processes={_PROCESSES.value} needs --coordinator=host:port and a --process below it; given are "
                f"{_COORDINATOR.value} and {_PROCESS.value}."
            )
        jax.distributed.initialize(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)


def main() -> None:
    """Defines the flags of the benchmarks, then parses and runs."""
    from jaxmoe.bench import command_line

    flags.adopt_module_key_flags(command_line)
    app.run(_run)


if __name__ == "__main__":
    main()
