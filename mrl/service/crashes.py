"""Records on disk which tenant's work is under way, and counts how often such work ended the
service.

A tenant's work can end the service's own process, for example through an algorithm's code or a step
that needs too much memory. A tenant whose work does this repeatedly is paused, so that the other
tenants can continue.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mrl.run import console
from mrl.system.files import write_whole

FILE = "under_way.json"
MAX_ENDS = 3
"""A tenant is paused after the service has ended this many times during the tenant's work. The
count begins again at 1 whenever the service ends during a later step than before."""
REASON = (
    f"the service ended {MAX_ENDS} times during this tenant's work, which came no further; see the "
    "output of the service (too little memory, or code of the tenant that ends the process), then "
    "resume the tenant"
)


class _Ends(NamedTuple):
    number: int
    step: int
    """The latest of the tenant's steps during which the service has ended; -1 if the service has
    ended only while the tenant was being opened."""


class Crashes:
    """Counts how often the service's process ended during each tenant's work. Only the rank that
    has the service folder keeps counts; other ranks do nothing."""

    def __init__(self, root: Path | None) -> None:
        """Read the counts that the previous process of the service left in the service folder
        `root`. If `root` is None, nothing is counted."""
        self._file = None if root is None else root / FILE
        self._ends: dict[str, _Ends] = {}
        if self._file is not None:
            self._read(self._file)

    def pop_crash_looping(self) -> list[str]:
        """Return the tenants during whose work the service has ended MAX_ENDS times, and set their
        counts to 0. These tenants must be paused."""
        names = [name for name, ends in self._ends.items() if ends.number >= MAX_ENDS]
        for name in names:
            self.forget(name)
        return names

    def begin(self, name: str, step: int) -> None:
        """Record that work on step `step` of a tenant is under way; -1 means that the tenant is
        being opened."""
        if self._file is not None:
            said = json.dumps({"under_way": name, "step": step, "ends": self._ends})
            with suppress(OSError):  # if the disk is full, the tenant's own writes report it
                write_whole(self._file, said + "\n")

    def end(self) -> None:
        """Record that no tenant's work is under way."""
        self.begin("", -1)

    def forget(self, name: str) -> None:
        """Remove the count of a tenant that leaves the service."""
        if self._ends.pop(name, None) is not None:
            self.end()

    def _read(self, file: Path) -> None:
        try:
            said = json.loads(file.read_text())
            self._ends = {name: _Ends(*map(int, ends)) for name, ends in said["ends"].items()}
            name, step = str(said["under_way"]), int(said["step"])
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError, AttributeError):
            console.warning(f"{file} is damaged and is written again")
            return
        if name:
            number, furthest = self._ends.get(name, (0, step))
            came_further = step > furthest  # progress: the count begins again at 1
            self._ends[name] = _Ends(1, step) if came_further else _Ends(number + 1, furthest)
            self.end()
