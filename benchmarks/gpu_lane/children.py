"""Child processes of the lane: one that outlives its limit is killed with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from mrl.system.processes import die_with_parent

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36


def kill_tree(pid: int) -> None:
    """Kill the process and every descendant, those in sessions of their own too."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family[1:], timeout=10)


def adopt_orphans() -> None:
    """What a part leaves behind becomes a child of this process, so that `end_children` finds it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> int:
    """Kill every descendant of this process: an engine that a part left behind holds its memory.

    Returns how many there were.
    """
    family = psutil.Process().children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(family, timeout=10)
    return len(family)


def bound(arguments: Sequence[str]) -> list[str]:
    """The command for `python ARGUMENTS` that dies with the thread that starts it."""
    return [sys.executable, "-m", "benchmarks.gpu_lane.children", str(os.getpid()), *arguments]


def run_limited(arguments: Sequence[str], log: Path, limit_s: float) -> tuple[int | None, float]:
    """Run `python ARGUMENTS` from the repository's root with its output in `log`.

    Returns (exit code, seconds); the code is None where it was killed at `limit_s`. The child dies with
    the thread that calls this.
    """
    start = time.monotonic()
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            bound(arguments),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
    return code, time.monotonic() - start


def run_child(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """`python ARGUMENTS` of a part, from the repository's root; its output is the part's own.

    It dies with the part. Raises CalledProcessError.
    """
    return subprocess.run(
        bound(arguments),
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        check=True,
    )


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # what Linux was asked for outlives execv
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
