"""Benchmarks: `python -m jaxmoe.bench layer --help`, and with the same flags `beside` and `peaks`."""
