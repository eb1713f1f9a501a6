"""This package holds the parts of `python -m benchmarks.stability`."""
