"""This module says how long mrl waits for an engine's answer to a control call, as in a weight sync.

Such a call keeps the scheduler from giving any other sign of life, so its time is all that tells a
slow engine from one that hangs.
"""

from __future__ import annotations

TIMES_LONGEST = 5
"""A path may take this much longer than it ever did, as the watchdog's phases may."""


class Patience:
    """Keeps how long the calls of each path have taken, over all starts of an engine."""

    def __init__(self, first_s: float, least_s: float) -> None:
        """`first_s`: limit of a path that was never answered, `least_s`: the least limit afterwards."""
        self._first_s = max(first_s, least_s)
        self.least_s = least_s
        self._longest_s: dict[str, float] = {}

    def limit_s(self, path: str) -> float:
        """Return the seconds in which a call of `path` must be answered; its query does not count."""
        longest_s = self._longest_s.get(_name(path))
        if longest_s is None:
            return self._first_s
        return max(self.least_s, TIMES_LONGEST * longest_s)

    def note(self, path: str, seconds: float) -> None:
        """Note that a call of `path` was answered after these seconds."""
        self._longest_s[_name(path)] = max(seconds, self._longest_s.get(_name(path), 0.0))


def _name(path: str) -> str:
    return path.partition("?")[0]
