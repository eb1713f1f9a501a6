"""What a layout costs, on paper: bytes, volumes and floating-point operations from a config.json.

Pure arithmetic: nothing here computes with torch or imports Megatron. Byte formulas are compared with
measured bytes in tests/parallel/scaling. Times are estimates and have not been measured on GPUs.
"""
