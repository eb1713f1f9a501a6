"""What a killed server would leave behind: processes of its session, files of shared memory.

Used by the trainer when it stops a server, and by the server when the trainer is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
OWN_PREFIXES = ("sglang_loads_", "sgl_shm_")
"""Names that SGLang gives; a file of the trainer's may be mapped there too."""
TRACKER_GRACE_S = 5.0
KILLED_S = 60.0
"""How long killed processes may take to end; a hanging device or disk may keep them."""


def session_processes(session: int) -> list[psutil.Process]:
    """The processes of a session that still run; zombies do not."""
    return [process for process in psutil.process_iter() if _runs_in(process, session)]


def shared_memory_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """The shared memory that these processes have mapped and nobody else will unlink."""
    files: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            files |= {Path(mapping.path) for mapping in process.memory_maps()}
    return {f for f in files if f.parent == SHARED_MEMORY and f.name.startswith(OWN_PREFIXES)}


def kill_session(session: int, *, spare: int | None = None) -> None:
    """SIGKILL every process of a session but `spare`, wait at most KILLED_S until they are gone, and
    free their memory. A process that a hanging device holds may never end.

    SIGKILL skips all of SGLang's own cleaning. Python's resource tracker is left to end by itself:
    it unlinks semaphores once the last process that used them is gone, the spared one too.
    """
    files = shared_memory_files(
        session_processes(session)
    )  # the spared one has some mapped as well
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
