"""Benchmarks: `python -m jaxmoe.bench layer --help`."""
