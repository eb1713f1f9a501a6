"""Compute the memory, traffic and time of a parallel layout from a recipe and a config.json.

This package is arithmetic: it does not import Megatron and computes nothing with torch. Its byte
formulas are compared with measured bytes in tests/planner. Its times are estimates; none was measured
on GPUs.
"""
