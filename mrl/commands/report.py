"""Reports the error that ends a run: its class, RUN/failure.json, and what the terminal shows."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mrl.errors import (
    DiskFailed,
    EngineGone,
    ExitCode,
    InputError,
    OutOfMemory,
    RankLost,
    RunFailed,
)
from mrl.rollout.base import EngineLost
from mrl.run.console import escape
from mrl.run.failure import (
    COMMAND_FILE,
    RUN_FILE,
    SAVED_FILE,
    Failure,
    print_failure,
    read_failure,
    saved_in,
    tail_of,
    write_failure,
)
from mrl.system.disk import chain, refusal, vanished
from mrl.system.files import write_whole
from mrl.system.launcher import LAUNCH_FOLDER

_NO_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|"
    r"NCCL communicator was aborted|Connection refused"
)
_OF_COLLECTIVE = re.compile(r"gloo|nccl|TCPStore|c10d|ProcessGroup", re.IGNORECASE)
Advice = Callable[[Exception], str | None]
"""Says what to do where memory ran out; returns None for another error."""
_LOG = re.compile(r"(?:its log is|see) (\S.*?\.log)\b")


@contextmanager
def reporting(
    folder: Path, command: str, advice: Advice, step: Callable[[], int | None]
) -> Iterator[None]:
    """Write RUN/failure.json where the block raises, and raise what was foreseen as a RunFailed of its
    class.

    `command` continues the run. `step` returns the number of steps done, None before the first could
    begin. Bad input and Ctrl-C are no failures of a run.
    """
    note_run_folder(folder, command)
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except Exception as error:
        if hasattr(error, _ATTRIBUTE):  # a nested `reporting` has handled it
            raise
        found = classified(error, advice, folder)
        found.__cause__ = None if found is error else error
        failure = failure_of(found, folder, command, step())
        with suppress(OSError):  # the disk may be what failed
            write_failure(folder, failure)
        setattr(found, _ATTRIBUTE, (folder, failure))
        if found is error:
            raise
        if isinstance(found, OutOfMemory):
            traceback.print_exception(error)  # where it happened
        raise found from error


_ATTRIBUTE = "__mrl_failure__"


def note_run_folder(folder: Path, command: str) -> None:
    """Tell `mrl.launch`, where it started this rank, where the run is, and what continues it."""
    if place := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            write_whole(Path(place) / COMMAND_FILE, command)
            write_whole(Path(place) / RUN_FILE, str(folder.absolute()))


def note_saved() -> None:
    """Tell `mrl.launch` that the run saved and left."""
    if place := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            (Path(place) / SAVED_FILE).touch()


def show(error: BaseException) -> bool:
    """Print the block of an error that `reporting` has seen, or leave it to `mrl.launch`; return False
    for another error.

    Ranks other than 0 print one line.
    """
    folder, failure = getattr(error, _ATTRIBUTE, (None, None))
    if folder is None or failure is None:
        return False
    if LAUNCH_FOLDER in os.environ:
        return True
    if failure.rank:
        print(f"mrl: [rank {failure.rank}] {escape(failure.what)}", file=sys.stderr)
    else:
        print_failure(read_failure(folder) or failure)
    return True


def classified(error: Exception, advice: Advice, folder: Path) -> Exception:
    """Return `error`, or the RunFailed that says what it means for the run."""
    if isinstance(error, RunFailed) and error.exit_code != ExitCode.FAILED:
        return error
    if text := advice(error):
        return OutOfMemory(text)
    if text := refusal(error, folder) or vanished(error, folder):
        return DiskFailed(text)
    for each in chain(error):
        if isinstance(each, EngineLost):
            return _with_notes(EngineGone(str(error)), each)
        text = str(each)
        if _NO_PEER.search(text) and _OF_COLLECTIVE.search(f"{type(each).__name__} {text}"):
            first = text.splitlines()[0]
            return RankLost(f"this rank lost the connection to another one, which is gone: {first}")
    return error


def failure_of(error: Exception, folder: Path, command: str, step: int | None) -> Failure:
    """Return the record of `error` on this rank."""
    is_foreseen = isinstance(error, RunFailed)
    text = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
    log = next((m[1] for m in _LOG.finditer(text) if Path(m[1]).is_file()), "")
    phase = next((p for each in chain(error) if (p := getattr(each, "phase", ""))), None)
    of_tenant = next((each for each in chain(error) if hasattr(each, "tenant")), None)
    said = re.search(r"Continue with: (.*)$", text)
    return Failure(
        what=text,
        exit_code=int(error.exit_code) if isinstance(error, RunFailed) else ExitCode.UNFORESEEN,
        rank=int(os.environ.get("RANK", "0")),
        phase=phase or ("start" if step is None else None),
        step=step if of_tenant is None else getattr(of_tenant, "step", step),
        tenant=getattr(of_tenant, "tenant", ""),
        log=log,
        log_tail=tail_of(log) if log else [],
        command=said[1] if said else command,
        is_echo=isinstance(error, RankLost),
        **saved_in(folder),
    )


def _with_notes(new: RunFailed, old: BaseException) -> RunFailed:
    for note in getattr(old, "__notes__", ()):
        new.add_note(note)
    return new
