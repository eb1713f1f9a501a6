"""Plan the memory, traffic and time of a parallel layout by formulas, from a recipe and a config.json.

This package is arithmetic: it imports no Megatron and computes nothing with torch. Its byte formulas
are compared with measured bytes in tests/planner. Its times are estimates; none was measured on GPUs.
"""
