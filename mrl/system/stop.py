"""Holds who has asked a run to stop early: SIGUSR1, or a callback."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NOBODY, CALLBACK, SIGNAL = 0, 1, 2
"""Who asked this rank; of all ranks the highest counts."""
WHO = {CALLBACK: "a callback stopped the run", SIGNAL: "SIGUSR1"}


class StopRequest:
    """Keeps what this rank was asked; the ranks of a run decide together."""

    def __init__(self) -> None:
        self.asked = NOBODY

    def from_callback(self) -> None:
        self.asked = max(self.asked, CALLBACK)

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Take SIGUSR1 for a request to stop, meanwhile."""
        before = signal.signal(signal.SIGUSR1, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.asked = SIGNAL
