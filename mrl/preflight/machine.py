"""Check the resources of this machine: open files, loopback, ports, shared memory, GPUs.

The checks take milliseconds. The check of peer access between GPUs has not been tried on a machine
with several GPUs.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from mrl.errors import InputError
from mrl.system.scratch import SHARED_MEMORY

MIN_FILES = 256
"""Lowest accepted limit on open files per process; a rank with an engine opens up to about 100."""
NUM_PORTS = 8
"""Number of ports that a rank and its engine need."""
CONNECT_TIMEOUT_S = 5.0
MIN_SHARED_BYTES = 16 << 20
"""Bytes of /dev/shm that a rank needs for buffers of NCCL and of the engine's processes."""


def check_machine(num_ranks: int, warn: Callable[[str], None]) -> None:
    """Raise InputError if this machine cannot run `num_ranks` ranks.

    `warn(text)` is called if a GPU cannot access the memory of another GPU, because collectives are
    then slow. GPUs are not checked on a machine without CUDA.
    """
    check_open_files()
    check_loopback()
    check_shared_memory(num_ranks)
    if torch.cuda.is_available():
        check_gpus(num_ranks, torch.cuda.device_count(), torch.cuda.can_device_access_peer, warn)


def check_open_files() -> None:
    """Increase this process's soft limit of open files to MIN_FILES if the limit is lower.

    Raises InputError if the hard limit is lower than MIN_FILES.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return
    if hard == resource.RLIM_INFINITY or hard >= MIN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_FILES, hard))
        return
    raise InputError(
        f"this shell allows a process {soft} open files (ulimit -n), expected at least {MIN_FILES}; "
        "start from a shell with a higher limit (ulimit -Hn shows the highest), or ask for one in "
        "/etc/security/limits.conf"
    )


def check_loopback() -> None:
    """Raise InputError if this machine cannot connect to itself, or has no free ports."""
    try:
        with ExitStack() as opened:
            listeners = [opened.enter_context(socket.socket()) for _ in range(NUM_PORTS)]
            for listener in listeners:
                listener.bind(("127.0.0.1", 0))
                listener.listen()
            address = listeners[-1].getsockname()
            opened.enter_context(socket.create_connection(address, CONNECT_TIMEOUT_S))
    except OSError as error:
        raise InputError(
            f"a connection to 127.0.0.1 fails ({error.strerror or error}), but ranks and engines use "
            "it to communicate; expected a loopback interface that is up (ip link set lo up) and free "
            "ports (sysctl net.ipv4.ip_local_port_range)"
        ) from None


def check_shared_memory(num_ranks: int, place: Path = SHARED_MEMORY) -> None:
    """Raise InputError if shared memory is missing, not writable, or too small for `num_ranks` ranks.

    `place` is the folder of shared memory, and `num_ranks` the number of ranks on this node.
    """
    need = num_ranks * MIN_SHARED_BYTES
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(
            f"{place} is not a folder that this user may write to; mount a tmpfs there"
        )
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if free < need:
        raise InputError(
            f"{place} has {free >> 20} MiB free, expected at least {need >> 20} MiB for {num_ranks} "
            "rank(s) of this node; remove stale files there, or give the container more (docker run "
            "--shm-size=16g)"
        )


def check_gpus(
    num_ranks: int,
    num_gpus: int,
    can_access: Callable[[int, int], bool],
    warn: Callable[[str], None],
) -> None:
    """Raise InputError if this node has fewer GPUs than ranks.

    `warn(text)` is called if a GPU cannot access the memory of another one. `can_access(a, b)` returns
    whether GPU a can access the memory of GPU b.
    """
    if num_ranks > num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        of = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise InputError(
            f"{num_ranks} ranks on this node, but {num_gpus} GPU(s){of}; start one rank for each GPU "
            "(--nproc-per-node), or make more GPUs visible"
        )
    apart = [
        (a, b)
        for a in range(num_ranks)
        for b in range(num_ranks)
        if a != b and not can_access(a, b)
    ]
    if apart:
        a, b = apart[0]
        warn(
            f"GPU {a} cannot access the memory of GPU {b} ({len(apart)} of "
            f"{num_ranks * (num_ranks - 1)} pairs): collectives go through the host's memory and are "
            "slow; look at nvidia-smi topo -p2p r"
        )


def local_ranks(world: int, num_gpus: int | None = None) -> int:
    """Return how many of `world` ranks this node runs.

    Under torchrun the result is LOCAL_WORLD_SIZE. Otherwise it is the smaller of `world` and
    `num_gpus`, and at least 1. `num_gpus` defaults to the number of GPUs of this machine.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return min(world, torch.cuda.device_count() if num_gpus is None else num_gpus) or 1
