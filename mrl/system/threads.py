"""CPU threads of the processes that compute on CPUs: trainer ranks and engines.

A product of small matrices takes about 10 us. A second thread that goes to sleep between two
products takes about 100 us to wake up. If it stays awake instead, it occupies a core that other
processes, such as the engine's, could use. So only models with wide layers gain from more threads
(docs/kernels.md).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mrl.errors import InputError

LARGEST = 1024
"""The largest accepted number of threads of a process."""
SMALLEST_WIDTH = 512
"""The smallest hidden size at which products take long enough for several threads."""
MARK = "MRL_ONE_THREAD"
"""The environment variable that shows that mrl, and not the user, has set OMP_NUM_THREADS."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def compute_with_one_thread() -> bool:
    """Compute with one thread, here and in child processes, unless OMP_NUM_THREADS is set.

    Return whether this changed anything. The number of threads also changes the order of sums, and
    therefore the results.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return False
    os.environ |= {"OMP_NUM_THREADS": "1", MARK: "1"}
    if "torch" in sys.modules:  # it has read the variable already
        sys.modules["torch"].set_num_threads(1)
    return True


def given_threads() -> int | None:
    """Return OMP_NUM_THREADS if the user has set it; None otherwise.

    The value may be a list, with a number for each level of nested parallel regions; then only the
    first number is used. Raises InputError if that number is not from 1 to LARGEST.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text or MARK in os.environ:
        return None
    first = text.split(",")[0].strip()
    if not (first.isdecimal() and len(first) < 10 and 1 <= int(first) <= LARGEST):
        raise InputError(
            f"OMP_NUM_THREADS: got {text!r:.40}, expected a number of threads from 1 to {LARGEST}"
        )
    return int(first)


def usable_cores() -> int:
    """Return the number of cores that this process may use, given its affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return cores


def shared_threads(width: int, num_processes: int) -> int:
    """Return the number of threads for each of `num_processes` concurrent processes on this machine.

    The processes compute with a model of the hidden size `width`.
    """
    return max(1, usable_cores() // num_processes) if width >= SMALLEST_WIDTH else 1
