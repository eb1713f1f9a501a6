"""Train or evaluate on one rank, and report the error that ends a job.

Both the `mrl` commands and the functions of the Python package `mrl` use this package.
"""
