"""Makes child processes die with their parent, and protects them from signals meant for the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends.

    `parent` is the PID of that thread's process. If the parent has already ended, this process exits.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with_parent`: Linux no longer kills this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def die_with_torchrun() -> None:
    """Make this rank die with torchrun, if torchrun started the rank.

    Without this call, ranks go on running after torchrun is killed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


@contextmanager
def children_without_usr1() -> Iterator[None]:
    """Block SIGUSR1 in processes that this thread starts in the `with` block, and in their descendants.

    If SLURM uses proctrack/linuxproc, it sends SIGUSR1 to all processes of a task. The ranks then
    save and exit. To save, they need their engines and workers, which the signal would kill.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Let a Ctrl-C that arrives in the `with` block raise KeyboardInterrupt only after the block.

    Python loses a KeyboardInterrupt that is raised in a callback of os.fork, where Ctrl-C is likely
    to find a large process; the run would go on. In a block that cleans up, a second Ctrl-C would
    skip the rest. A fork that leaves the block does not get the Ctrl-C of its parent. Outside the
    main thread, and where Ctrl-C is ignored or handled otherwise, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    arrived: list[int] = []  # the processes it arrived in
    signal.signal(signal.SIGINT, lambda *_: arrived.append(os.getpid()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.getpid() in arrived:
            raise KeyboardInterrupt


class Closing:
    """Mixin with which a class that has a close() method can be used in a `with` statement."""

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
