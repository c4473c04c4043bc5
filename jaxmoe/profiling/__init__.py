"""Where the time of one layer goes: `python -m jaxmoe.profiling timeline --help`."""
