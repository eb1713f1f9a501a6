"""The answers of a session's operations on disk, so that they survive a restart of the service.

RUN_FOLDER/answers.jsonl has a line for each operation that has ended. An operation that changed weights
or gradients counts only if its effect is in the checkpoint at which the session is opened again;
otherwise it is lost, and stays so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mrl.errors import DiskFailed
from mrl.run import console
from mrl.run.json_lines import add_line, as_line
from mrl.system.files import write_whole

FILE = "answers.jsonl"
MAX_LINES = 2048
MAX_BYTES = 64 << 20
"""Maximum number and size of the answers that are kept when a session is opened; the newest ones."""
MAX_FILE_BYTES = 4 * MAX_BYTES
"""The file is shortened when it is longer than this."""
LOST_AT = (
    "lost: the service ended or the session was left before a checkpoint had it; the session went on "
    "from its checkpoint of version {}"
)


@dataclass(frozen=True)
class Entry:
    """One operation that has ended."""

    id: str
    kind: str
    key: str | None
    digest: str
    """A digest of the operation's body."""
    state: str
    """`done`, `failed` or `lost`."""
    version: int
    """The version of the weights after the operation."""
    answer: Any
    """The result, or the reason."""

    def is_in(self, version: int) -> bool:
        """Return whether a checkpoint of `version`, of the same life, has the effect of the operation,
        if it has one."""
        if self.state != "done":
            return True
        if self.kind in ("optim_step", "load"):
            return self.version <= version
        if self.kind == "forward_backward":  # its gradients are in the next version
            return self.version < version
        return True


class Journal:
    """The file of one session. Only rank 0 uses it. Where the disk refuses, mrl warns once and goes
    on."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._has_warned = False

    def open(self, version: int) -> list[Entry]:
        """Return the answers of earlier lives, the oldest first, now that the session is opened at
        `version`. Those whose effect that checkpoint lacks become lost."""
        entries = [
            entry
            if entry.is_in(version)
            else replace(entry, state="lost", answer=LOST_AT.format(version))
            for entry in self._read()
        ]
        entries = _newest(entries)
        self._write(entries)
        return entries

    def add(self, entry: Entry) -> None:
        """Add an answer."""
        with suppress(OSError):
            if self._file.stat().st_size > MAX_FILE_BYTES:
                self._write(_newest(self._read()))
        try:
            add_line(self._file, asdict(entry))
        except OSError as error:
            self._warn(error)

    def _read(self) -> list[Entry]:
        """Return all answers; a line that was written in part is left out."""
        found: list[Entry] = []
        with suppress(OSError):
            for line in self._file.read_bytes().splitlines():
                with suppress(ValueError, TypeError):
                    found.append(Entry(**json.loads(line)))
        return found

    def _write(self, entries: Iterable[Entry]) -> None:
        text = "".join(as_line(asdict(each)) for each in entries)
        if not text and not self._file.exists():
            return
        try:
            write_whole(self._file, text)
        except (OSError, DiskFailed) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            console.warning(f"answers will not survive a restart: {error}")


def _newest(entries: list[Entry]) -> list[Entry]:
    """Return the newest entries within the limits. Optimizer steps, loads and failures are small and
    counted apart: they tell a client whether its work was lost, however many samples follow."""
    kept: list[Entry] = []
    total = num_large = num_small = 0
    for each in reversed(entries):
        if each.kind in ("optim_step", "load") or each.state == "failed":
            num_small += 1
            is_kept = num_small <= MAX_LINES
        else:
            num_large += 1
            total += len(json.dumps(each.answer))
            is_kept = num_large <= MAX_LINES and total <= MAX_BYTES
        if is_kept:
            kept.append(each)
    return kept[::-1]
