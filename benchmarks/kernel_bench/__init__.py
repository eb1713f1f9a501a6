"""This package holds the parts of `benchmarks/bench_kernels.py`: cases, baselines, peers and clocks.

It is not named `kernels`: a folder of that name on the path would be taken for the package `kernels`,
which transformers imports when it finds it.
"""
