"""Starts and owns engines, on the trainer's devices or on separate ranks (`remote`)."""
