"""Ties child processes to their parent: they die with it, and do not get its signals."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when the thread that started it, in process `parent`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`, for a process that ends by a time limit of its own from now on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def die_with_torchrun() -> None:
    """Die with torchrun, where this is a rank of it: a killed torchrun would leave its ranks
    running."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


@contextmanager
def children_without_usr1() -> Iterator[None]:
    """Let the processes that this thread starts meanwhile, and all below them, never get SIGUSR1.

    SLURM's proctrack/linuxproc signals the whole tree of a task: the ranks save and leave, for which
    they need their engines and workers, which would die of the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Closing:
    """Gives `with` to a class that has a close()."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError
