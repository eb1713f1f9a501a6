"""Reports the error that ends a run: classifies it, writes RUN/failure.json, and prints it."""

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
from mrl.system.printable import escape
from mrl.system.streams import is_closed_pipe

_NO_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|"
    r"NCCL communicator was aborted|Connection refused"
)
_OF_COLLECTIVE = re.compile(r"gloo|nccl|TCPStore|c10d|ProcessGroup", re.IGNORECASE)
Advice = Callable[[Exception], str | None]
"""A function that is called with an error. If the error means that memory ran out, the function
returns one line of advice, otherwise None."""
_LOG = re.compile(r"(?:its log is|see) (\S.*?\.log)\b")


@contextmanager
def reporting(
    folder: Path, command: str, advice: Advice, step: Callable[[], int | None]
) -> Iterator[None]:
    """If the `with` block raises an error, write RUN/failure.json and raise the error again.

    If `classified` knows the cause of the error, a RunFailed is raised in its place. InputError and
    KeyboardInterrupt are not recorded, because they are not failures of a run. An error that a nested
    `reporting` has recorded is not recorded again.

    `command` is the command that continues the run. `step()` returns the number of steps done, or
    None before the trainer exists.
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
    """Tell `mrl.launch`, through two files, the run folder and the command that continues the run.

    Does nothing if `mrl.launch` did not start this rank.
    """
    if place := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            write_whole(Path(place) / COMMAND_FILE, command)
            write_whole(Path(place) / RUN_FILE, str(folder.absolute()))


def note_saved() -> None:
    """Create the file that tells `mrl.launch` that the run was saved and stopped early.

    Does nothing if `mrl.launch` did not start this rank.
    """
    if place := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            (Path(place) / SAVED_FILE).touch()


def show(error: BaseException) -> bool:
    """Print an error that `reporting` has recorded, and return True; return False for other errors.

    Rank 0 prints the whole report, and the other ranks print one line each. Under `mrl.launch` no
    rank prints anything, because the launcher prints the report.
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
    """Return a RunFailed that explains `error` if the cause of the error is known, else `error`
    itself."""
    from mrl.engines.base import EngineLost  # with torch, which the command line does not import

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
    """Return the record of `error` on this rank, to be written to RUN/failure.json."""
    is_foreseen = isinstance(error, RunFailed)
    text = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
    log = next((m[1] for m in _LOG.finditer(text) if Path(m[1]).is_file()), "")
    phase = next((p for each in chain(error) if (p := getattr(each, "phase", ""))), None)
    of_tenant = next((each for each in chain(error) if hasattr(each, "tenant")), None)
    continues = re.search(r"Continue with: (.*)$", text)
    return Failure(
        what=text,
        exit_code=_exit_code(error),
        rank=int(os.environ.get("RANK", "0")),
        phase=phase or ("start" if step is None else None),
        step=step if of_tenant is None else getattr(of_tenant, "step", step),
        tenant=getattr(of_tenant, "tenant", ""),
        log=log,
        log_tail=tail_of(log) if log else [],
        command=continues[1] if continues else command,
        is_echo=isinstance(error, RankLost),
        **saved_in(folder),
    )


def _exit_code(error: Exception) -> int:
    """Return the exit code with which the command line ends for `error`."""
    if isinstance(error, RunFailed):
        return int(error.exit_code)
    is_of_output = isinstance(error, BrokenPipeError) and is_closed_pipe(sys.stdout)
    return ExitCode.BROKEN_PIPE if is_of_output else ExitCode.UNFORESEEN


def _with_notes(new: RunFailed, old: BaseException) -> RunFailed:
    for note in getattr(old, "__notes__", ()):
        new.add_note(note)
    return new
