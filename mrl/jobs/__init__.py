"""This room trains or evaluates on one rank, and reports the error that ends a job.

Both the `mrl` commands and the functions of the Python package `mrl` use it.
"""
