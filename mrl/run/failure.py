"""The report of a failure: a record in `RUN/failure.json`, and a block of lines on rank 0's terminal.

Several processes may report the same fault: the rank that fails, the ranks that lose their
connection to it, the watchdog's monitor (`mrl.watch`) and the launcher (`mrl.launch`).
`write_failure` keeps the record that is closest to the cause. This module does not import torch,
because the monitor and the launcher run without it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mrl.errors import MEANINGS, ExitCode
from mrl.system.files import write_whole
from parallel.checkpoint.snapshot_note import note_to_resume

FILE = "failure.json"
SERVICE_FILE = "service.yaml"
"""A folder with this file belongs to a service."""
EARLIER = "failures.jsonl"
"""File with the failure records of earlier starts of a run, one per line."""
RUN_FILE, COMMAND_FILE = "run_folder", "command"
"""Two files in the launcher's folder (mrl/system/launcher.py). A rank writes the path of the run folder
to the first, and the command that continues the run to the second."""
SAVED_FILE = "saved"
"""File in the launcher's folder that rank 0 creates when the run has stopped after saving a
checkpoint."""
ENDED_FILE = "ended"
"""File in the launcher's folder to which the watchdog writes the run's exit code before it kills
the ranks."""
OVER_FILE = "over"
"""File in the launcher's folder that is created when a rank is killed because it does not exit after
the end of the run. The launcher then does not report the kill as a failure."""
TAIL_LINES = 15
TAIL_BYTES = 16384
MAX_RANKS = 16
"""Largest number of ranks that the printed report lists if a rank hung."""
_LEAST_SPECIFIC = (ExitCode.UNFORESEEN, ExitCode.FAILED, ExitCode.LOST_RANK)
"""The exit codes that say least about the cause of a failure, the least informative one first."""


@dataclass(frozen=True)
class Failure:
    """A record of why and where a run or a service ended.

    A field whose value is not known is None or empty.
    """

    what: str
    """What happened, in one line."""
    exit_code: int
    rank: int | None = None
    host: str = field(default_factory=socket.gethostname)
    phase: str | None = None
    step: int | None = None
    tenant: str = ""
    """The tenant for which a service was working; empty outside a service."""
    since_s: float | None = None
    """Seconds between the beginning of the failure and its detection."""
    cause: str = ""
    log: str = ""
    """Path of the log to read first."""
    log_tail: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    """If a rank hung, one line per rank with its phase and its last collective."""
    saved_step: int | None = None
    """Number of steps done when the newest checkpoint was saved; None without a checkpoint."""
    snapshot_step: int | None = None
    """Number of steps done when the snapshot on the nodes was saved; None if no snapshot is newer
    than every checkpoint."""
    is_service: bool = False
    """Whether a service ended. Each tenant of a service has its own checkpoints, so the fields
    `saved_step` and `snapshot_step` do not apply."""
    command: str = ""
    """The command that continues the run."""
    is_echo: bool = False
    """Whether `rank` only reports that it lost the connection to another rank."""
    time: float = field(default_factory=time.time)
    """When this record was made, in seconds since 1970."""


def write_failure(folder: str | Path, failure: Failure) -> Failure:
    """Write `failure` to RUN/failure.json, unless the record in the file is closer to the cause.

    `folder` is the run folder. Return the record that is in the file afterwards. Raises OSError if
    the file cannot be written.
    """
    folder = Path(folder)
    with _locked(folder):
        there = read_failure(folder)
        if there is not None and not _is_nearer(failure, there):
            return there
        text = json.dumps(dataclasses.asdict(failure), indent=2, ensure_ascii=False)
        write_whole(folder / FILE, text.encode(errors="backslashreplace") + b"\n")
    return failure


def read_failure(folder: str | Path) -> Failure | None:
    """Return the failure record in a run folder; None if there is no readable record."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        row = json.loads((Path(folder) / FILE).read_text())
        names = {each.name for each in dataclasses.fields(Failure)}
        return Failure(**{key: value for key, value in row.items() if key in names})
    return None


def clear_failure(folder: str | Path) -> None:
    """Move the failure record of an earlier start to `failures.jsonl`, because a new start begins."""
    file = Path(folder) / FILE
    with suppress(FileNotFoundError), _locked(Path(folder)):
        text = file.read_bytes()
        with suppress(ValueError):
            line = json.dumps(json.loads(text), ensure_ascii=False)
            with (file.parent / EARLIER).open("a") as stream:
                stream.write(line + "\n")
        file.unlink()


def print_failure(failure: Failure, stream: TextIO | None = None) -> None:
    """Print the report of a failure, by default on stderr.

    The report shows what failed and where, the end of the log, which checkpoint was saved, and the
    command that continues the run.
    """
    text = "\n".join(lines_of(failure)) + "\n"
    out: TextIO = stream or sys.stderr
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))
    out.flush()


def lines_of(failure: Failure) -> Iterator[str]:
    """Yield the lines of the report of a failure. Control codes in untrusted text are made visible."""
    yield f"mrl: {_safe(failure.what)}"
    yield _row("where", _where(failure))
    if failure.since_s is not None:
        yield _row("since", f"{failure.since_s:.1f} s before this report")
    if failure.cause:
        yield _row("cause", failure.cause)
    if failure.log:
        yield _row("log", f"{failure.log}{', which ends with' if failure.log_tail else ''}")
    yield from (f"            | {_safe(line)}" for line in failure.log_tail)
    if failure.ranks:
        yield _row("ranks", "phase, state of the process, last collective")
    yield from (f"            | {_safe(line)}" for line in failure.ranks[:MAX_RANKS])
    if len(failure.ranks) > MAX_RANKS:
        yield f"            | and {len(failure.ranks) - MAX_RANKS} more in {FILE}"
    yield _row("saved", _saved(failure))
    yield _row("exit code", f"{failure.exit_code}: {_meaning(failure.exit_code)}")
    if failure.command:
        yield _row("next", failure.command)


def newest_step(folder: str | Path) -> int | None:
    """Return the number of steps done when a run's newest checkpoint was saved; None without one."""
    with suppress(OSError, ValueError):
        file = Path(folder) / "checkpoints/latest_checkpointed_iteration.txt"
        return int(file.read_text())
    return None


def newest_snapshot(folder: str | Path) -> int | None:
    """Return the number of steps done when a run's snapshot was saved.

    The result is None if no snapshot is newer than every checkpoint. Only the next start finds out
    whether the snapshot's files still exist.
    """
    with suppress(OSError, ValueError):
        note = note_to_resume(Path(folder) / "checkpoints", sys.maxsize)
        return None if note is None else note.step
    return None


def saved_in(folder: str | Path) -> dict[str, Any]:
    """Return the fields of a Failure that say which checkpoints the folder of a run or service has."""
    return {
        "saved_step": newest_step(folder),
        "snapshot_step": newest_snapshot(folder),
        "is_service": (Path(folder) / SERVICE_FILE).exists(),
    }


def tail_of(log: str | Path, lines: int = TAIL_LINES) -> list[str]:
    """Return the last non-empty lines of a log, at most `lines`; empty if the log cannot be read."""
    with suppress(OSError), open(log, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        found = file.read().decode(errors="replace").splitlines()
        return [line for line in found[1 if start else 0 :] if line.strip()][-lines:]
    return []


def _row(name: str, text: str) -> str:
    return f"  {name:<10}{_safe(text)}"


def _where(failure: Failure) -> str:
    parts = [
        "" if failure.rank is None else f"rank {failure.rank}",
        f"host {failure.host}" if failure.host else "",
        f"phase {failure.phase}" if failure.phase else "",
        "" if failure.step is None else f"step {failure.step}",
        f"tenant {failure.tenant}" if failure.tenant else "",
    ]
    return ", ".join(part for part in parts if part)


def saved_text(folder: str | Path) -> str:
    """Return in words which checkpoints the folder of a run has."""
    return _saved(Failure("", ExitCode.INTERRUPTED, **saved_in(folder)))


def _saved(failure: Failure) -> str:
    step, snapshot = failure.saved_step, failure.snapshot_step
    if failure.is_service:
        return "each tenant's newest checkpoint; the next start continues with all tenants"
    kept = "no checkpoint" if step is None else f"a checkpoint with {step} steps done"
    if snapshot is not None:
        return f"{kept}, and a snapshot on the nodes with {snapshot} steps done"
    return f"{kept}; the next start begins with step 0" if step is None else kept


def _meaning(code: int) -> str:
    try:
        return MEANINGS[ExitCode(code)]
    except ValueError:
        return "see the log"


def _safe(text: str) -> str:
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _is_nearer(new: Failure, there: Failure) -> bool:
    """Return whether a new record is closer to the cause of a failure than the existing one.

    A rank that fails writes its record before it exits. Other ranks, which then lose their
    connection to that rank, write their records later.
    """
    if new.is_echo:
        return False
    if there.is_echo:
        return _specificity(new.exit_code) >= _specificity(ExitCode.LOST_RANK)
    if new.exit_code == ExitCode.LOST_RANK and new.rank == there.rank:
        return False  # the rank itself has reported why it ended
    return _specificity(new.exit_code) > _specificity(there.exit_code)


def _specificity(code: int) -> int:
    """Return how specific an exit code is: a larger number says more about the cause."""
    if code in _LEAST_SPECIFIC:
        return _LEAST_SPECIFIC.index(ExitCode(code))
    return len(_LEAST_SPECIFIC)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, so that only one process at a time reads and replaces the record."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
