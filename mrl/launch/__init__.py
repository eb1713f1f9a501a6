"""`python -m mrl.launch` starts the ranks of a run as torchrun does, and reports how they ended.

It takes torchrun's arguments. Where torchrun ends with a traceback of its own and code 1, this prints
one block (mrl/run/failure.py) and exits with the code of the rank that failed. Signals go to the ranks.
With `--max-restarts N` on one node the ranks are started again, at most N times, after a fault that
another start may survive.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrl.errors import ExitCode, InputError
from mrl.launch.ranks import LauncherWatchdog, children
from mrl.run.failure import (
    COMMAND_FILE,
    ENDED_FILE,
    OVER_FILE,
    RUN_FILE,
    SAVED_FILE,
    Failure,
    print_failure,
    read_failure,
    saved_in,
    write_failure,
)
from mrl.system.launcher import LAUNCH_FOLDER
from mrl.system.oom_killer import OomKills, read_oom_kills
from mrl.system.process_search import kill_by_variable
from mrl.system.rendezvous import check_rendezvous
from mrl.system.scratch import Scratch, sweep

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that the ranks heed: they save, where they can, and end."""
ENDS_AT_ONCE = "SIGINT,SIGQUIT"
"""Signals at which torch ends the ranks; by default it does so at those of FORWARDED, too."""
C10D_PORT = 29400
"""The port that torch's c10d rendezvous takes where none is given."""
ALONE_S = 20.0
"""How long torch may take to come back after the watchdog has killed the ranks."""
LEFTOVERS_S = 10.0
"""How long processes that the ranks started may run on after them, as engines need to clean up."""
TRIED_AGAIN = {
    *(ExitCode.UNFORESEEN, ExitCode.LOST_RANK, ExitCode.HUNG_RANK, ExitCode.LOST_ENGINE),
}
"""What another start may survive."""


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks; the entry point of `python -m mrl.launch`."""
    for number in FORWARDED:  # while torch is imported, too
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _forward)
    from torch.distributed.run import parse_args

    words = sys.argv[1:] if argv is None else argv
    args = parse_args([f"--signals-to-handle={ENDS_AT_ONCE}", *words])
    _silence()
    try:
        _check_flags(args)
        _check_endpoint(args)
    except InputError as error:
        print(f"mrl: {error}", file=sys.stderr)
        sys.exit(ExitCode.BAD_INPUT)
    restarts = 0
    if _is_one_node(args):
        restarts, args.max_restarts = args.max_restarts, 0
    for start in range(restarts + 1):
        code = _run(args)
        if code not in TRIED_AGAIN or start == restarts or _come:
            sys.exit(code)
        print(f"mrl: starts again, {start + 1} of {restarts} restarts", file=sys.stderr, flush=True)


_come: list[int] = []
"""Signals that came: what was told to end is not started again."""


def _run(args: Any) -> int:
    """Start the ranks once; return the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    sweep()  # of launchers and engines that were killed
    scratch = Scratch("launch")
    folder = scratch.path
    os.environ[LAUNCH_FOLDER] = str(folder)
    # torch would leave an empty folder of its own in the temporary directory at every start
    logs = args.log_dir or str(folder)
    killed = read_oom_kills()
    watch = LauncherWatchdog(folder, has_watchdog=_has_watchdog(args))
    threading.Thread(target=watch.run, daemon=True).start()
    if not _is_one_node(args):
        threading.Thread(target=_leave_alone, args=(scratch,), daemon=True).start()
    try:
        run(argparse.Namespace(**{**vars(args), "log_dir": logs}))
    except ChildFailedError as error:
        return _report(error, folder, killed, watch.failure)
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:  # a node did not come, or the port is taken
        reason = str(error.__cause__ or error).splitlines()[0]
        print(f"mrl: the ranks could not meet: {reason}", file=sys.stderr, flush=True)
        return ExitCode.LOST_RANK
    finally:
        kill_by_variable(LAUNCH_FOLDER, str(folder), LEFTOVERS_S)
        del os.environ[LAUNCH_FOLDER]
        scratch.remove()
    return ExitCode.DONE


def _is_one_node(args: Any) -> bool:
    return str(args.nnodes) in ("1", "1:1")


def _has_watchdog(args: Any) -> bool:
    """Whether the ranks run `mrl train` or `mrl serve`, which start the watchdog."""
    is_mrl = args.module and args.training_script == "mrl"
    return is_mrl and args.training_script_args[:1] in (["train"], ["serve"])


def _leave_alone(scratch: Scratch) -> None:
    """End this process where the watchdog has killed the ranks and torch does not come back: it then
    waits for the store of the first node, which may be out of reach."""
    ended = scratch.path / ENDED_FILE
    while not ended.exists():
        if not scratch.path.exists():
            return  # the start is over
        time.sleep(1)
    code = int(_text(ended))
    time.sleep(ALONE_S)
    if scratch.path.exists():
        print("mrl: the other nodes do not answer: leaves alone", file=sys.stderr, flush=True)
        scratch.remove()
        os._exit(code)


def _check_flags(args: Any) -> None:
    """Raise InputError where torch would end with a traceback for what a flag says."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    checks = [
        ("--nnodes", args.nnodes, parse_min_max_nnodes, "a number of nodes, or MIN:MAX"),
        ("--nproc-per-node", args.nproc_per_node, determine_local_world_size,
         "a number of ranks, or gpu where there are GPUs"),
        ("--rdzv-endpoint", args.rdzv_endpoint, lambda text: parse_rendezvous_endpoint(text, 0),
         "HOST:PORT"),
    ]  # fmt: skip
    for flag, given, read, expected in checks:
        try:
            read(given)
        except (ValueError, RuntimeError):
            raise InputError(f"{flag}: got {given!r}, expected {expected}") from None


def _check_endpoint(args: Any) -> None:
    """Raise InputError where another program holds the port at which the nodes are to meet."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import get_rdzv_endpoint

    is_static = args.rdzv_backend == "static"
    if args.standalone or (is_static and not args.rdzv_endpoint and args.master_port is None):
        return  # torch takes a free port
    if is_static or args.rdzv_backend == "c10d":
        host, port = parse_rendezvous_endpoint(get_rdzv_endpoint(args), C10D_PORT)
        if port > 0:
            check_rendezvous(host, port)


def _report(error: Any, folder: Path, killed: OomKills, hung: Failure | None) -> int:
    """Print the block of what ended the ranks, where that was a failure; return its code.

    `killed`: the kernel's counters when the ranks were started. `hung`: the failure of a rank that was
    killed because it hung while starting.
    """
    if (folder / SAVED_FILE).exists():  # whichever rank torch then counts as first
        return ExitCode.SAVED
    number, first = _first(error)
    if (folder / OVER_FILE).exists() and first.exitcode == -signal.SIGKILL:
        return ExitCode.DONE  # the run was done; a rank that did not end was killed afterwards
    run = _text(folder / RUN_FILE)
    if first.exitcode in (
        ExitCode.BAD_INPUT, ExitCode.SAVED, ExitCode.INTERRUPTED,
        ExitCode.TERMINATED, ExitCode.HANGUP,
    ):  # fmt: skip
        return first.exitcode
    if -first.exitcode in FORWARDED:
        return 128 - first.exitcode
    found = read_failure(run) if run else None
    if first.exitcode < 0:
        lost = dataclasses.replace(
            hung or _killed(number, signal.Signals(-first.exitcode).name, killed, found),
            **(saved_in(run) if run else {}),
            command=_text(folder / COMMAND_FILE) or shlex.join(_own_command()),
        )
        found = lost
        if run:
            with suppress(OSError):
                found = write_failure(run, lost)
    if found is None:  # not a run, or it had not begun: it has printed why
        return first.exitcode
    print_failure(dataclasses.replace(found, command=found.command or _text(folder / COMMAND_FILE)))
    return found.exit_code


def _killed(rank: int, name: str, before: OomKills, found: Failure | None) -> Failure:
    """Return the failure of a rank that the signal `name` killed; `found`: the recorded failure."""
    cause, is_memory = "", False
    if name == "SIGKILL":
        cause, is_memory = read_oom_kills().since(before)
        cause = cause or "the kernel, out of memory, or a user"
    return Failure(
        what=f"rank {rank} was killed by {name}",
        exit_code=ExitCode.OUT_OF_MEMORY if is_memory else ExitCode.LOST_RANK,
        rank=rank,
        host=socket.gethostname(),
        cause=cause,
        log="" if found is None else found.log,
        step=None if found is None else found.step,
    )


def _first(error: Any) -> tuple[int, Any]:
    """Return (rank, failure) of what ended the ranks.

    torch ends the others with SIGTERM and may count them as first. A rank that saved and left
    stands for all of them.
    """
    saved = [(n, f) for n, f in error.failures.items() if f.exitcode == ExitCode.SAVED]
    own = [(n, f) for n, f in error.failures.items() if f.exitcode != -signal.SIGTERM]
    if saved or own:
        return min(saved or own, key=lambda pair: pair[1].timestamp)
    return error.get_first_failure()


def _own_command() -> list[str]:
    """Return how this process was started, for ranks that die before they know their run."""
    return ["python", *sys.orig_argv[1:]]


def _forward(number: int, frame: Any) -> None:
    """Give a signal to the ranks."""
    _come.append(number)
    for pid in children():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""


def _silence() -> None:
    """Leave out torchrun's own lines on ranks that failed, unless LOGLEVEL asks for them."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
