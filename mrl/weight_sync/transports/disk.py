"""`rollout.weight_sync=disk`: buckets are written to files, and SGLang reads them. For each engine, the
files are written by the first of the trainer's ranks that the engine spans.

This transport is only for engines on the trainer's devices.
"""

from mrl.engines.sglang.weights.disk import DiskPush as Push

__all__ = ["Push", "opens_handles"]

opens_handles = False
