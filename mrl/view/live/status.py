"""What a run or a service is doing, and whether it is alive, from the files in its folder."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from mrl.run.failure import FILE as FAILURE
from mrl.run.failure import Failure, read_failure
from mrl.run.phase_file import ENDED, SIGN_S, is_gone, read_phase
from mrl.run.phase_file import FILE as PHASE
from mrl.system.heartbeat import LEFT
from mrl.system.json_text import is_number
from mrl.view.facts import local_time
from mrl.view.live.run_files import Signature, signature

SILENT_S = 6 * SIGN_S
"""If phase.json is older than this, its writer counts as gone."""
MAX_TEXT = 2000
"""The largest number of characters that the page shows of a failure."""


class Status:
    """The newest phase.json and failure.json of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phase: dict[str, Any] | None = None
        """The phase as the page shows it; None if it is not known."""
        self.failure: Failure | None = None
        self.is_there = self.was_there = False
        """Whether the folder is there, and whether it ever was."""
        self._raw: dict[str, Any] | None = None
        self._phase: Signature = None
        self._failure: Signature = None
        self._gone = False

    def poll(self) -> bool:
        """Look at the files. Return whether the phase has changed."""
        self.is_there = self.folder.is_dir()
        self.was_there |= self.is_there
        failure = signature(self.folder / FAILURE)
        if failure != self._failure:
            self._failure = failure
            self.failure = None if failure is None else read_failure(self.folder)
        found, has_changed = signature(self.folder / PHASE), False
        if found != self._phase:
            self._phase = found
            self._raw = None if found is None else read_phase(self.folder)
            shown = None if self._raw is None else _shown(self._raw)
            has_changed, self.phase = shown != self.phase, shown
        self._gone = self._raw is not None and is_gone(self._raw)
        return has_changed

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life; 0 if there is no phase.json."""
        return 0.0 if self._raw is None else max(0.0, time.time() - _time(self._raw["time"]))

    @property
    def last_sign(self) -> float:
        """When phase.json was written last, in seconds since 1970; 0 if that is not known."""
        return 0.0 if self._raw is None else _time(self._raw["time"])

    @property
    def has_ended(self) -> bool:
        """Whether phase.json says that the run has ended, or its process is gone."""
        return self._raw is not None and (self._raw["phase"] in (ENDED, LEFT) or self._gone)

    def word(self, *, is_done: bool, has_rows: bool) -> str:
        """Return the state of the run in one word, which the page also uses as a class: `waiting`,
        `deleted`, `failed`, `finished`, `ended`, `gone`, `silent`, `running` or `unknown`.

        is_done: whether all its steps are done.
        """
        if not self.is_there:
            return "deleted" if self.was_there or has_rows else "waiting"
        if self.failure is not None:
            return "failed"
        if self._raw is None:
            return "finished" if is_done else "unknown" if has_rows else "waiting"
        if self.has_ended:
            is_killed = self._gone and self._raw["phase"] not in (ENDED, LEFT)
            return "finished" if is_done else "gone" if is_killed else "ended"
        return "silent" if self.silent_s > SILENT_S else "running"


def in_words(word: str, folder: Path, what: str = "run") -> str:
    """Return a sentence about the state that `Status.word` returned; empty for a run that runs."""
    return {
        "waiting": f"waits for {folder}: the {what} has not begun",
        "deleted": f"{folder} is gone: the page shows what was read before",
        "failed": f"the {what} has failed",
        "finished": "finished",
        "ended": f"the {what} has ended",
        "gone": f"the process of the {what} is gone, and has left no report: it was killed",
        "silent": f"no sign of life of the {what}: its node or the file system may be down",
        "unknown": "the present phase is not known: watch.enabled is off, or an older mrl writes here",
    }.get(word, "")


def failure_in_words(failure: Failure) -> dict[str, Any]:
    """Return a failure as the page shows it."""
    where = [
        *([] if failure.rank is None else [f"rank {failure.rank}"]),
        *([f"host {failure.host}"] if failure.host else []),
        *([f"phase {failure.phase}"] if failure.phase else []),
        *([] if failure.step is None else [f"step {failure.step}"]),
        *([f"tenant {failure.tenant}"] if failure.tenant else []),
    ]
    log = [str(line) for line in failure.log_tail] if isinstance(failure.log_tail, list) else []
    return {
        "what": str(failure.what)[:MAX_TEXT],
        "where": ", ".join(where)[:MAX_TEXT],
        "when": local_time(_time(failure.time)),
        "command": str(failure.command)[:MAX_TEXT],
        "log": str(failure.log)[:MAX_TEXT],
        "log_tail": "\n".join(log)[-4 * MAX_TEXT :],
    }


def _shown(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows of phase.json, with numbers that it can compute with."""
    spans = [
        [str(span[0])[:64], _time(span[1]), None if span[2] is None else _time(span[2])]
        for span in raw["spans"]
        if isinstance(span, list) and len(span) == 3
    ]
    return {
        "phase": raw["phase"][:64],
        "step": raw["step"],
        "tenant": raw["tenant"][:64],
        "since": _time(raw["since"]),
        "finished": max(0, raw["finished"]),
        "wanted": max(0, raw["wanted"]),
        "spans": spans,
    }


def _time(value: Any) -> float:
    """Return a time in seconds since 1970; 0 if the value is not one."""
    return float(value) if is_number(value) and math.isfinite(value) and abs(value) < 1e11 else 0.0
