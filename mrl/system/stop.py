"""Requests to stop a run early, by SIGUSR1, SIGTERM, SIGHUP or a callback.

SIGTERM and SIGHUP are usually followed by SIGKILL. After one of these two signals, the run saves at
the end of its step if it can do so within a time limit. Otherwise it reports what is lost and
exits.
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
"""The sources of a request to stop. If ranks have requests from different sources, the highest
value counts."""
_early_signals: list[int] = []
"""Numbers of the signals that arrived before there was a run to stop."""
WHO = {
    CALLBACK: "a callback stopped the run",
    SIGNAL: "SIGUSR1",
    HANGUP: "SIGHUP",
    TERMINATION: "SIGTERM",
}
ASKED_BY = {signal.SIGUSR1: SIGNAL, signal.SIGHUP: HANGUP, signal.SIGTERM: TERMINATION}
FOLLOWED_BY_SIGKILL = (signal.SIGHUP, signal.SIGTERM)


def remember_signals() -> None:
    """Remember SIGUSR1 instead of letting it kill the process.

    The next run that handles signals then stops early.
    """
    signal.signal(signal.SIGUSR1, _remember)


@contextmanager
def remembering_signals() -> Iterator[None]:
    """Remember a SIGUSR1 that arrives in the `with` block, for a run that starts in the block."""
    before = signal.getsignal(signal.SIGUSR1)
    remember_signals()
    try:
        yield
    finally:
        _early_signals.clear()
        signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)


def _remember(number: int, frame: Any) -> None:
    _early_signals.append(number)


def stopped_early(who: int, step: int) -> str:
    """Return the message of a run that stopped before this process trained a step.

    `step` is the number of steps that were done in earlier starts. `who` is the source of the
    request to stop, such as SIGNAL.
    """
    return (
        f"{WHO[who]}: stopped before the first step of this start, nothing is lost; start again to "
        f"continue with step {step}"
    )


def stopped_at(who: int, step: int, *, is_saved: bool) -> str:
    """Return the message of a run that stopped with `step` steps done.

    `who` is the source of the request to stop, such as SIGNAL. `is_saved` says whether a checkpoint
    was saved.
    """
    if not is_saved:
        return (
            f"{WHO[who]}: stopped with {step} steps done; debug.rollout_only saves no checkpoint, "
            "so the next start begins from step 0"
        )
    return (
        f"{WHO[who]}: saved a checkpoint with {step} steps done; start again to continue with step "
        f"{step}"
    )


class StopRequest:
    """The request to stop that this rank has received, if any.

    The ranks of a run decide together whether to stop.
    """

    def __init__(
        self,
        limit_s: float = 25.0,
        saved_step: Callable[[], int | None] = lambda: None,
        lost: str = "",
    ) -> None:
        """Begin without a request to stop.

        `limit_s` is the number of seconds between SIGTERM or SIGHUP and the moment when the process
        ends itself. `saved_step` returns the number of steps done when the newest checkpoint was saved,
        or None without a checkpoint. `lost` replaces the text that is printed when the process ends
        itself; a service sets it, because the default text is about a run.
        """
        self.source = NOBODY
        self._limit_s = limit_s
        self._saved_step, self._lost = saved_step, lost
        self._timer: threading.Timer | None = None

    def from_callback(self) -> None:
        self.source = max(self.source, CALLBACK)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Treat SIGUSR1, SIGTERM and SIGHUP as requests to stop, during the `with` block.

        A SIGUSR1 that `remember_signals` has caught before also counts. A signal that the process
        ignores, such as SIGHUP under nohup, stays ignored.
        """
        before = {number: signal.getsignal(number) for number in ASKED_BY}
        handled = [number for number in before if before[number] != signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._on_signal)
        if _early_signals:
            self.source = SIGNAL
        with self._watching_for_signals():
            try:
                yield
            finally:
                for number in handled:
                    signal.signal(number, before[number] or signal.SIG_DFL)
                if self._timer is not None:
                    self._timer.cancel()

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != _owner[-1]:  # a fork of the run, such as the writer of a checkpoint
            if number == signal.SIGUSR1:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.source = max(self.source, ASKED_BY[signal.Signals(number)])

    @contextmanager
    def _watching_for_signals(self) -> Iterator[None]:
        """Run a thread that notices signals during the `with` block.

        The thread notices a signal even while the main thread waits in a collective.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        _owner.append(os.getpid())
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            _owner.pop()
            os.close(writer)  # ends the thread
            thread.join()
            os.close(reader)

    def _watch(self, reader: int) -> None:
        while data := os.read(reader, 1):
            number = data[0]
            if number not in FOLLOWED_BY_SIGKILL or self._timer is not None:
                continue
            if _has_lost_a_sibling():  # torchrun is ending the ranks: no step can finish
                os._exit(128 + number)
            self._timer = threading.Timer(self._limit_s, self._give_up, (number,))
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self, number: int) -> None:
        if os.environ.get("RANK", "0") == "0":
            saved = self._saved_step()
            kept = "there is no checkpoint" if saved is None else f"{saved} steps are saved"
            lost = self._lost or (
                "the step was not finished and saved within "
                f"checkpoint.stop_limit_s={self._limit_s:g} s; {kept}, later training is lost"
            )
            sys.stderr.write(
                f"mrl: {signal.Signals(number).name}: {lost}; start again to continue\n"
            )
            sys.stderr.flush()
        os._exit(128 + number)


_owner: list[int] = []
"""PIDs of the processes that entered `handling_signals`. A fork of the run inherits the list, and
sees from the last PID that it is not the run's process."""


def _leave_signals() -> None:
    """Disable, in a fork of the run, the pipe to which Python writes the numbers of signals.

    Otherwise, the thread with which the run notices its own signals would also notice the
    fork's signals.
    """
    if _owner:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_signals)


def _has_lost_a_sibling() -> bool:
    """Return whether the torchrun that started this rank has fewer ranks left than it started."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or local is None:
        return False
    alive = 0
    for file in Path(f"/proc/{os.getppid()}/task").glob("*/children"):
        with suppress(OSError):
            alive += sum(is_running(int(pid)) for pid in file.read_text().split())
    return alive < int(local)
