"""What a layout costs, on paper: bytes, volumes and floating-point operations from a config.json.

Pure arithmetic: nothing here imports torch or Megatron. Byte formulas are compared with measured
bytes in tests/parallel/test_scaling_*.py. Times are estimates and have not been measured on GPUs.
"""
