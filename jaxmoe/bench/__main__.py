"""`python -m jaxmoe.bench layer [flags]`."""

import sys

from absl import app, flags


def _run(argv: list[str]) -> None:
    from jaxmoe.bench import layer

    if argv[1:] != ["layer"]:
        raise app.UsageError(f"name what to measure: python -m jaxmoe.bench layer [flags]; got {argv[1:]}")
    sys.exit(layer.main())


def main() -> None:
    """Defines the flags of the benchmarks, then parses and runs."""
    from jaxmoe.bench import layer

    flags.adopt_module_key_flags(layer)
    app.run(_run)


if __name__ == "__main__":
    main()
