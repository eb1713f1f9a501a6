"""Check the settings of the trainer's CUDA allocator, because engines read the trainer's memory."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.errors import InputError

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables that torch reads: the current name and the older one."""
KEY = "expandable_segments"


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raise InputError if the environment turns on torch's expandable segments.

    With `rollout.weight_sync=tensor` the engine receives CUDA IPC handles of the trainer's buffers.
    Memory of an expandable segment is mapped with cuMemMap, and cudaIpcGetMemHandle fails for such
    memory. torch then sends file descriptors instead (c10/cuda/CUDACachingAllocator.cpp,
    ExpandableSegment::share). The engine duplicates them with pidfd_getfd, which the kernel permits
    only to a process that may ptrace the trainer.
    """
    for name in VARIABLES:
        for setting in environment.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == KEY and value.strip().lower() == "true":
                raise InputError(
                    f"{name}={environment[name]}: expandable segments change the handles by which "
                    "rollout.weight_sync=tensor gives the engine the trainer's memory; leave "
                    f"{KEY} out of it, or set rollout.weight_sync=disk"
                )
