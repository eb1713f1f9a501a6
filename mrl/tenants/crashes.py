"""Whose work was under way when the service ended without a clean stop, written down on disk.

Work in the service's own process can end it: an algorithm's code, or a step that takes too much memory.
Where one tenant's does so again and again, that tenant is left out, so that the others go on.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.run import console
from mrl.system.files import write_whole

FILE = "under_way.json"
MAX_ENDS = 3
"""Ends of the service in one tenant's work, with no progress between them, that pause the tenant."""
REASON = (
    f"the service ended {MAX_ENDS} times during this tenant's work, which came no further; see the "
    "output of the service (too little memory, or code of the tenant that ends the process), then "
    "resume the tenant"
)


@dataclass
class _Ends:
    number: int
    step: int
    """The furthest step at which the service ended; -1 while the tenant was opened."""


class Crashes:
    """Counts the ends of the service during each tenant's work, on the rank that has its folder."""

    def __init__(self, root: Path | None) -> None:
        """Read what the last start left in the service folder `root`; None counts nothing."""
        self._file = None if root is None else root / FILE
        self._ends: dict[str, _Ends] = {}
        if self._file is not None:
            self._read(self._file)

    def take_culprits(self) -> list[str]:
        """Return the tenants that are to be paused, and begin to count anew for them."""
        culprits = [name for name, ends in self._ends.items() if ends.number >= MAX_ENDS]
        for name in culprits:
            self.forget(name)
        return culprits

    def begin(self, name: str, step: int) -> None:
        """Note that work of a tenant is under way, for this step of it; -1 where it is opened."""
        if self._file is not None:
            ends = {each: [counted.number, counted.step] for each, counted in self._ends.items()}
            said = json.dumps({"under_way": name, "step": step, "ends": ends})
            with suppress(OSError):  # where the disk is full, work itself says so
                write_whole(self._file, said + "\n")

    def end(self) -> None:
        """Note that nobody's work is under way."""
        self.begin("", -1)

    def forget(self, name: str) -> None:
        """Forget the ends of a tenant that leaves."""
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
            console.warning(f"{file} is damaged and is written anew")
            return
        if name:
            self._count(name, step)
            self.end()

    def _count(self, name: str, step: int) -> None:
        """Count an end; where the tenant came further than before, it is the first."""
        before = self._ends.get(name)
        if before is None or step > before.step:
            self._ends[name] = _Ends(1, step)
        else:
            before.number += 1
