"""Benchmarks: `python -m jaxmoe.bench layer --help`, and with the same flags `scan`, `beside` and `peaks`."""
