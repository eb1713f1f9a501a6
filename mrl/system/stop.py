"""Holds who has asked a run to stop early: SIGUSR1, SIGTERM, SIGHUP, or a callback.

SIGTERM and SIGHUP are mostly followed by SIGKILL: the run saves at the end of its step if that is soon
enough, and otherwise says what is lost and ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mrl.system.proc import is_running

NOBODY, CALLBACK, SIGNAL, HANGUP, TERMINATION = range(5)
"""Who asked this rank; of all ranks the highest counts."""
_come: list[int] = []
"""Signals that came before there was a run to stop."""
WHO = {
    CALLBACK: "a callback stopped the run",
    SIGNAL: "SIGUSR1",
    HANGUP: "SIGHUP",
    TERMINATION: "SIGTERM",
}
ASKED_BY = {signal.SIGUSR1: SIGNAL, signal.SIGHUP: HANGUP, signal.SIGTERM: TERMINATION}
IN_A_HURRY = (signal.SIGHUP, signal.SIGTERM)


def remember_signals() -> None:
    """Let SIGUSR1 no longer end the process: the next run that heeds signals stops for it."""
    signal.signal(signal.SIGUSR1, _remember)


@contextmanager
def remembering_signals() -> Iterator[None]:
    """Remember SIGUSR1 meanwhile, for a run that starts in here."""
    before = signal.getsignal(signal.SIGUSR1)
    remember_signals()
    try:
        yield
    finally:
        _come.clear()
        signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)


def _remember(number: int, frame: Any) -> None:
    _come.append(number)


def left_early(who: int, step: int) -> str:
    """Return why a run stopped before the first step of its start, with `step` steps done."""
    return (
        f"{WHO[who]}: stopped before the first step of this start, nothing is lost; start again to "
        f"continue with step {step}"
    )


def left(who: int, step: int, *, is_saved: bool) -> str:
    """Return why a run stopped with `step` steps done."""
    if not is_saved:
        return (
            f"{WHO[who]}: stopped with {step} steps done; debug.rollout_only saves no checkpoint, "
            "another start begins anew"
        )
    return (
        f"{WHO[who]}: saved a checkpoint with {step} steps done; start again to continue with step "
        f"{step}"
    )


class StopRequest:
    """Keeps what this rank was asked; the ranks of a run decide together."""

    def __init__(
        self,
        limit_s: float = 25.0,
        saved_step: Callable[[], int | None] = lambda: None,
        lost: str = "",
    ) -> None:
        """`limit_s`: seconds from SIGTERM or SIGHUP to the end of the process. `saved_step` returns the
        steps done in the newest checkpoint, None where there is none. `lost` says what is lost where
        the limit is over, for what is no run."""
        self.asked = NOBODY
        self._limit_s = limit_s
        self._saved_step, self._lost = saved_step, lost
        self._timer: threading.Timer | None = None

    def from_callback(self) -> None:
        self.asked = max(self.asked, CALLBACK)

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Take SIGUSR1, SIGTERM and SIGHUP for requests to stop, meanwhile; a SIGUSR1 that was
        remembered is one, too. A signal that is ignored (nohup) stays ignored."""
        before = {number: signal.getsignal(number) for number in ASKED_BY}
        heeded = [number for number in before if before[number] != signal.SIG_IGN]
        for number in heeded:
            signal.signal(number, self._on_signal)
        if _come:
            self.asked = SIGNAL
        with self._hearing_at_once():
            try:
                yield
            finally:
                for number in heeded:
                    signal.signal(number, before[number] or signal.SIG_DFL)
                if self._timer is not None:
                    self._timer.cancel()

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != _owner[-1]:  # a fork of the run, such as the writer of a checkpoint
            if number == signal.SIGUSR1:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = max(self.asked, ASKED_BY[signal.Signals(number)])

    @contextmanager
    def _hearing_at_once(self) -> Iterator[None]:
        """Let a thread hear of the signals, also while the main thread waits in a collective."""
        hears, tells = os.pipe()
        os.set_blocking(tells, False)
        _owner.append(os.getpid())
        before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._hear, args=(hears,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            _owner.pop()
            os.close(tells)  # ends the thread
            thread.join()
            os.close(hears)

    def _hear(self, hears: int) -> None:
        while data := os.read(hears, 1):
            number = data[0]
            if number not in IN_A_HURRY or self._timer is not None:
                continue
            if _has_lost_a_sibling():  # torchrun ends the others: no step can end any more
                os._exit(128 + number)
            self._timer = threading.Timer(self._limit_s, self._give_up, (number,))
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self, number: int) -> None:
        if os.environ.get("RANK", "0") == "0":
            saved = self._saved_step()
            kept = "no checkpoint is there" if saved is None else f"{saved} steps are saved"
            lost = self._lost or (
                "the step was not over and saved after "
                f"checkpoint.stop_limit_s={self._limit_s:g} s; {kept}, what was trained since is lost"
            )
            sys.stderr.write(
                f"mrl: {signal.Signals(number).name}: {lost}; start again to continue\n"
            )
            sys.stderr.flush()
        os._exit(128 + number)


_owner: list[int] = []
"""The process that heeds signals."""


def _leave_signals() -> None:
    """Let a fork of the run die of signals, and tell nobody."""
    if _owner:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_signals)


def _has_lost_a_sibling() -> bool:
    """Whether torchrun, which started this rank, has fewer ranks left than it started."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or local is None:
        return False
    alive = 0
    for file in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with suppress(OSError):
            alive += sum(is_running(int(pid)) for pid in file.read_text().split())
    return alive < int(local)
