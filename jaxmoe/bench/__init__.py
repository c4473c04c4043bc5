"""Benchmarks: `python -m jaxmoe.bench layer --help`, `python -m jaxmoe.bench peaks`."""
