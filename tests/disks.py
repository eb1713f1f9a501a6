"""Disks of a few megabytes, and read-only ones, for a process alone: tmpfs in a mount namespace."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from tests.ranks import start_fork

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REC, MS_PRIVATE = 0x1, 0x4000, 0x40000


def mount_disk(folder: Path, num_bytes: int, num_inodes: int = 0) -> None:
    """Mount an empty disk of `num_bytes` on `folder`, which only this process and its children see.

    0 inodes set no limit.

    Raises OSError where the kernel does not let this user. The process must have one thread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = os.getuid(), os.getgid()
    _call("unshare", CLONE_NEWNS if ids[0] == 0 else CLONE_NEWNS | CLONE_NEWUSER)
    if ids[0]:
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in zip(("uid_map", "gid_map"), ids, strict=True):
            Path(f"/proc/self/{name}").write_text(f"0 {number} 1")
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    options = f"size={num_bytes},nr_inodes={num_inodes}".encode()
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", 0, options)


def fill_up(folder: Path) -> None:
    """Put an empty disk of one page over a folder, after `mount_disk`."""
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", 0, b"size=4096")


def make_read_only(folder: Path) -> None:
    """Put an empty read-only file system over a folder, after `mount_disk`."""
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", MS_RDONLY, None)


@cache
def can_mount(folder: Path = Path("/tmp")) -> bool:
    """Whether this user may mount such a disk."""
    fork = start_fork(_try, folder / f"mrl-mount-{os.getpid()}")
    fork.join()
    return fork.exitcode == 0


def _try(folder: Path) -> None:
    try:
        mount_disk(folder, 1 << 20)
        code = 0
    except OSError:
        code = 1
    os._exit(code)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
