"""Holds who has asked a run to stop early: SIGUSR1, or a callback."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NOBODY, CALLBACK, SIGNAL = 0, 1, 2
"""Who asked this rank; of all ranks the highest counts."""
_come: list[int] = []
"""Signals that came before there was a run to stop."""
WHO = {CALLBACK: "a callback stopped the run", SIGNAL: "SIGUSR1"}


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

    def __init__(self) -> None:
        self.asked = NOBODY

    def from_callback(self) -> None:
        self.asked = max(self.asked, CALLBACK)

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Take SIGUSR1 for a request to stop, meanwhile; one that was remembered is one, too."""
        before = signal.signal(signal.SIGUSR1, self._on_signal)
        if _come:
            self.asked = SIGNAL
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.asked = SIGNAL
