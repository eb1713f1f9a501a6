"""Parts of `python -m benchmarks.stability`."""
