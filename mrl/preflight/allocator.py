"""Checks the settings of the trainer's CUDA allocator, whose memory an engine reads."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.errors import InputError

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that torch reads: the present name and the older one."""
KEY = "expandable_segments"


def check_allocator(environment: Mapping[str, str]) -> None:
    """Raises InputError where the environment asks torch for expandable segments.

    `rollout.weight_sync=tensor` hands the engine CUDA IPC handles of the trainer's buffers. Memory of
    an expandable segment is mapped by cuMemMap, and cudaIpcGetMemHandle does not take it: torch then
    sends file descriptors instead (c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment::share), which
    the engine can take over only where the kernel lets it (pidfd_getfd needs the right to trace us).
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
