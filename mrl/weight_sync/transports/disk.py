"""`rollout.weight_sync=disk`: the leader of an engine writes the buckets into files, and SGLang
reads them.

This transport is only for engines on the trainer's devices.
"""

from mrl.engines.sglang.weights.disk import DiskPush as Push

__all__ = ["Push", "opens_handles"]

opens_handles = False
