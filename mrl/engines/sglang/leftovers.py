"""Removes what a killed server leaves behind: the processes of its session (POSIX `setsid`), and shared
memory files.

The trainer uses this module when it stops a server. The server uses it when its trainer has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from mrl.system.scratch import SHARED_MEMORY

OWN_PREFIXES = ("sglang_loads_", "sgl_shm_")
"""The prefixes of SGLang's own files in SHARED_MEMORY. SGLang's processes may also have
mapped files there that belong to the trainer."""
TRACKER_GRACE_S = 5.0
KILLED_S = 60.0
"""The most seconds to wait until killed processes have ended. A device or disk that hangs can delay
their end."""


def session_processes(session: int) -> list[psutil.Process]:
    """Return the running processes of the POSIX session with the id `session`, without zombies."""
    return [process for process in psutil.process_iter() if _runs_in(process, session)]


def shared_memory_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the shared memory files of SGLang that these processes have mapped."""
    files: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            files |= {Path(mapping.path) for mapping in process.memory_maps()}
    return {f for f in files if f.parent == SHARED_MEMORY and f.name.startswith(OWN_PREFIXES)}


def kill_session(session: int, *, spare: int | None = None) -> None:
    """Kill every process of a session except `spare`, wait up to KILLED_S until they have ended, and
    unlink their shared memory. A process that waits for a hanging device may never end.

    `session` is the id of a POSIX session. SIGKILL prevents SGLang's own cleanup. Python's resource
    tracker is killed only after TRACKER_GRACE_S: when the last process that used semaphores has ended,
    the tracker unlinks them and ends by itself. If a process is spared, the tracker is never killed,
    because the spared process may still use the semaphores.
    """
    # The spared process may have mapped some, too.
    files = shared_memory_files(session_processes(session))
    begun = time.monotonic()
    deadline = begun + TRACKER_GRACE_S
    while left := [p for p in session_processes(session) if p.pid != spare]:
        if time.monotonic() > begun + KILLED_S:
            break
        files |= shared_memory_files(left)
        trackers = [p for p in left if _is_resource_tracker(p)]
        if spare is not None and len(trackers) == len(left):
            break
        for process in left:
            if process in trackers and (spare is not None or time.monotonic() < deadline):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    for file in files:
        file.unlink(missing_ok=True)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _runs_in(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
