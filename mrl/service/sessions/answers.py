"""The answers of a session's operations that have ended, as far as they are kept in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

MAX_KEPT = 2048
"""Maximum number of answers that are kept for a session."""
MAX_KEPT_BYTES = 64 << 20
KEPT_S = 3600.0
"""How long an answer is kept, in seconds."""
State = Literal["queued", "running", "done", "failed", "lost"]


@dataclass
class Answer:
    """The answer of an operation that has ended."""

    state: State
    text: bytes
    """The result of the operation as JSON text. If the operation failed or was lost, the reason as
    JSON text."""
    since_s: float
    is_read: bool = False
    """Whether a client has got it."""


class Answers:
    """Answers by the id of their operation, in the order in which they were added. Only one thread at a
    time may call the methods."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._num_bytes = 0

    def add(self, operation: str, state: State, text: bytes) -> None:
        """Add an answer, and drop others beyond the limits."""
        self._drop(operation)
        self._kept[operation] = Answer(state, text, time.monotonic())
        self._num_bytes += len(text)
        self._forget_old()

    def add_earlier(self, operation: str, state: State, text: bytes) -> None:
        """Add an answer that is older than all others, unless there is one of this operation."""
        if operation not in self._kept:
            self._kept[operation] = Answer(state, text, time.monotonic())
            self._kept.move_to_end(operation, last=False)
            self._num_bytes += len(text)

    def read(self, operation: str) -> Answer | None:
        """Return the answer for a client; None if it is not kept."""
        self._forget_old()
        if (found := self._kept.get(operation)) is not None:
            found.is_read = True
        return found

    def _drop(self, operation: str) -> None:
        if (dropped := self._kept.pop(operation, None)) is not None:
            self._num_bytes -= len(dropped.text)

    def _forget_old(self) -> None:
        """Drop answers until their number, size and age are within the limits: the oldest of those that
        a client has got, and then of the others. The newest answer always stays."""
        oldest = time.monotonic() - KEPT_S
        while len(self._kept) > 1 and next(iter(self._kept.values())).since_s < oldest:
            self._drop(next(iter(self._kept)))
        if not self._is_full():
            return
        old = list(self._kept.items())[:-1]
        for operation, _ in sorted(old, key=lambda item: not item[1].is_read):
            self._drop(operation)
            if not self._is_full():
                return

    def _is_full(self) -> bool:
        return len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES
