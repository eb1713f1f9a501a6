"""One report a failure: the record in `RUN/failure.json` and the block that rank 0's terminal shows.

Several processes may see the same fault: the rank that fails, the ranks that lose it, the monitor, the
launcher. `write_failure` keeps the record of the cause. No torch is imported here, as the monitor and
the launcher have none.
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
"""The file by which the folder of a service is known."""
EARLIER = "failures.jsonl"
"""The records of earlier starts of a run, one a line."""
RUN_FILE, COMMAND_FILE = "run_folder", "command"
"""The files in the launcher's folder (mrl/system/launcher.py) in which a rank names its run and the
command that continues it."""
SAVED_FILE = "saved"
"""The file in that folder by which rank 0 says that the run saved and left."""
ENDED_FILE = "ended"
"""The file in that folder by which the watchdog says that it has killed the ranks: the exit code."""
OVER_FILE = "over"
"""This file exists in that folder if a rank was killed after the run was done."""
TAIL_LINES = 15
TAIL_BYTES = 16384
MAX_RANKS = 16
"""The ranks whose places the block shows."""
_SAYS_LITTLE = (ExitCode.UNFORESEEN, ExitCode.FAILED, ExitCode.LOST_RANK)
"""Codes from the one that says least upwards; every other one says more than these."""


@dataclass(frozen=True)
class Failure:
    """A `Failure` is what is known of the end of a run; what is not known is None or empty."""

    what: str
    """What happened, in one line."""
    exit_code: int
    rank: int | None = None
    host: str = field(default_factory=socket.gethostname)
    phase: str | None = None
    step: int | None = None
    tenant: str = ""
    """Whose work it was, where a service works for several."""
    since_s: float | None = None
    """How long it had lasted when it was found."""
    cause: str = ""
    log: str = ""
    """The one log that matters."""
    log_tail: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    """The phase and the last collective of each rank, one line a rank, where a rank hung."""
    saved_step: int | None = None
    """The steps done in the newest checkpoint; None where there is none."""
    snapshot_step: int | None = None
    """The steps done in the snapshot on the nodes; None where it is not newer than every checkpoint."""
    is_service: bool = False
    """Whether it is the end of a service, whose tenants have checkpoints of their own."""
    command: str = ""
    """What continues the run."""
    is_echo: bool = False
    """Whether `rank` says no more than that it cannot reach another one any more."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""


def write_failure(folder: str | Path, failure: Failure) -> Failure:
    """Write RUN/failure.json, unless one is there that is nearer to the cause; return the one that is
    there then.

    Raises OSError where the file cannot be written.
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
    """Return the record of a run folder; None where there is none that can be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        row = json.loads((Path(folder) / FILE).read_text())
        names = {each.name for each in dataclasses.fields(Failure)}
        return Failure(**{key: value for key, value in row.items() if key in names})
    return None


def clear_failure(folder: str | Path) -> None:
    """Move the record of an earlier start to `failures.jsonl`: the run has started again."""
    file = Path(folder) / FILE
    with suppress(FileNotFoundError), _locked(Path(folder)):
        text = file.read_bytes()
        with suppress(ValueError):
            line = json.dumps(json.loads(text), ensure_ascii=False)
            with (file.parent / EARLIER).open("a") as stream:
                stream.write(line + "\n")
        file.unlink()


def print_failure(failure: Failure, stream: TextIO | None = None) -> None:
    """Print the block: what, where, since when, the end of the log, what is saved, what to do."""
    text = "\n".join(lines_of(failure)) + "\n"
    out: TextIO = stream or sys.stderr
    encoding = out.encoding or "utf-8"
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))
    out.flush()


def lines_of(failure: Failure) -> Iterator[str]:
    """Return the lines of the block, with the control codes of untrusted text made visible."""
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
    """Return the steps done in the newest checkpoint of a run folder; None where there is none."""
    with suppress(OSError, ValueError):
        file = Path(folder) / "checkpoints/latest_checkpointed_iteration.txt"
        return int(file.read_text())
    return None


def newest_snapshot(folder: str | Path) -> int | None:
    """Return the steps done in the snapshot of a run, where it is newer than every checkpoint; else
    None. Whether its files outlived the failure only the next start can tell."""
    with suppress(OSError, ValueError):
        note = note_to_resume(Path(folder) / "checkpoints", sys.maxsize)
        return None if note is None else note.step
    return None


def saved_in(folder: str | Path) -> dict[str, Any]:
    """Return what is saved in the folder of a run or a service, as fields of a Failure."""
    return {
        "saved_step": newest_step(folder),
        "snapshot_step": newest_snapshot(folder),
        "is_service": (Path(folder) / SERVICE_FILE).exists(),
    }


def tail_of(log: str | Path, lines: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log; none where it cannot be read."""
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


def _saved(failure: Failure) -> str:
    step, snapshot = failure.saved_step, failure.snapshot_step
    if failure.is_service:
        return "each tenant's newest checkpoint; the next start continues with all tenants"
    kept = "no checkpoint" if step is None else f"a checkpoint with {step} steps done"
    if snapshot is not None:
        return f"{kept}, and a snapshot on the nodes with {snapshot} steps done"
    return f"{kept}; the next start begins anew" if step is None else kept


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
    """Whether a record is nearer to the cause of a failure than the one that is there.

    A rank writes its record before it ends, so whoever then loses the connection to it comes later.
    """
    if new.is_echo:
        return False
    if there.is_echo:
        return _weight(new.exit_code) >= _weight(ExitCode.LOST_RANK)
    if new.exit_code == ExitCode.LOST_RANK and new.rank == there.rank:
        return False  # it has said itself why it ended
    return _weight(new.exit_code) > _weight(there.exit_code)


def _weight(code: int) -> int:
    """Return how much a code says."""
    return _SAYS_LITTLE.index(ExitCode(code)) if code in _SAYS_LITTLE else len(_SAYS_LITTLE)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time look at the record and replace it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
