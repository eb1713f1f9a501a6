"""`python -m mrl.launch` starts the ranks of a run as torchrun does, and reports how they ended.

The arguments are those of torchrun. If a rank fails, torchrun prints its own traceback and exits
with code 1. mrl.launch instead prints one block of text (mrl/run/failure.py) and exits with that
rank's exit code. mrl.launch also forwards signals to the ranks. With `--max-restarts N` on one
node, the ranks are started again, at most N times, after a failure that another start may survive.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
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
from mrl.system.files import text_or_empty
from mrl.system.launcher import LAUNCH_FOLDER
from mrl.system.oom_killer import OomKills, read_oom_kills
from mrl.system.process_search import kill_by_variable
from mrl.system.rendezvous import check_rendezvous
from mrl.system.scratch import Scratch, sweep

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that are forwarded to the ranks, which then save a checkpoint, if they can, and exit."""
ENDS_AT_ONCE = "SIGINT,SIGQUIT"
"""Value of torchrun's option --signals-to-handle: the signals after which torch ends the ranks. By
default, torch would also end the ranks after some of the FORWARDED signals."""
EXPECTED = "python -m mrl.launch --nproc-per-node N -m mrl train RECIPE [key=value ...]"
C10D_PORT = 29400
"""The port that torch's c10d rendezvous uses by default."""
RETURN_S = 20.0
"""The seconds that torch may take to return after the watchdog has killed the ranks."""
LEFTOVERS_S = 10.0
"""The seconds that processes started by the ranks may outlive the ranks. Engines need this time to
clean up."""
RESTARTED_CODES = {
    *(ExitCode.UNFORESEEN, ExitCode.LOST_RANK, ExitCode.HUNG_RANK, ExitCode.LOST_ENGINE),
}
"""Exit codes of failures after which the ranks are started again."""


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks; the entry point of `python -m mrl.launch`."""
    for number in FORWARDED:  # before torch is imported, which takes a while
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _forward)
    from mrl.system.threads import compute_with_one_thread

    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        _silence()
        _check_script(args)
        _check_flags(args)
        _check_endpoint(args)
    except InputError as error:
        print(f"mrl: {error}", file=sys.stderr)
        sys.exit(ExitCode.BAD_INPUT)
    compute_with_one_thread()  # otherwise torchrun does it, and ranks take it for the user's choice
    restarts = 0
    if _is_one_node(args):
        restarts, args.max_restarts = args.max_restarts, 0
    for start in range(restarts + 1):
        code = _run(args)
        if code not in RESTARTED_CODES or start == restarts or _forwarded:
            sys.exit(code)
        text = f"mrl: starting the ranks again, restart {start + 1} of {restarts}"
        print(text, file=sys.stderr, flush=True)


_forwarded: list[int] = []
"""The signals that were forwarded to the ranks. After any such signal the ranks are not started
again."""


def _run(args: Any) -> int:
    """Start the ranks once, wait for them, and return the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    sweep()  # removes files that killed launchers and engines have left
    scratch = Scratch("launch")
    folder = scratch.path
    os.environ[LAUNCH_FOLDER] = str(folder)
    # Without a log folder, torch would leave an empty one in the temporary directory at every start.
    logs = args.log_dir or str(folder)
    killed = read_oom_kills()
    watch = LauncherWatchdog(folder, has_watchdog=_has_watchdog(args))
    threading.Thread(target=watch.run, daemon=True).start()
    if not _is_one_node(args):
        threading.Thread(target=_exit_without_others, args=(scratch,), daemon=True).start()
    try:
        run(argparse.Namespace(**{**vars(args), "log_dir": logs}))
    except ChildFailedError as error:
        return _report(error, folder, killed, watch.failure)
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:  # a node is missing, or the port is taken
        reason = str(error.__cause__ or error).splitlines()[0]
        print(f"mrl: the nodes could not connect: {reason}", file=sys.stderr, flush=True)
        return ExitCode.LOST_RANK
    finally:
        kill_by_variable(LAUNCH_FOLDER, str(folder), LEFTOVERS_S)
        del os.environ[LAUNCH_FOLDER]
        scratch.remove()
    return ExitCode.DONE


def _is_one_node(args: Any) -> bool:
    return str(args.nnodes) in ("1", "1:1")


def _has_watchdog(args: Any) -> bool:
    """Return whether the ranks run `mrl train` or `mrl serve`, which start the watchdog."""
    is_mrl = args.module and args.training_script == "mrl"
    return is_mrl and args.training_script_args[:1] in (["train"], ["serve"])


def _exit_without_others(scratch: Scratch) -> None:
    """Exit this process if torch does not return after the watchdog has killed the ranks.

    torch then waits for the rendezvous store on the first node, which may be unreachable. Run this
    function in a thread, if there are several nodes.
    """
    ended = scratch.path / ENDED_FILE
    while not ended.exists():
        if not scratch.path.exists():
            return  # `_run` has ended
        time.sleep(1)
    code = int(text_or_empty(ended))
    time.sleep(RETURN_S)
    if scratch.path.exists():
        text = "mrl: the other nodes do not answer; exiting without them"
        print(text, file=sys.stderr, flush=True)
        scratch.remove()
        os._exit(code)


def _parse(words: Sequence[str]) -> Any:
    """Parse torchrun's arguments. Raises InputError with argparse's reason, without its usage."""
    from torch.distributed.run import parse_args

    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return parse_args([f"--signals-to-handle={ENDS_AT_ONCE}", *words])
    except SystemExit as end:
        if not end.code:  # --help
            raise
    reason = printed.getvalue().strip().rpartition("error: ")[2]
    raise InputError(f"{reason}; expected {EXPECTED}; --help lists the options")


def _check_script(args: Any) -> None:
    """Raise InputError for a recipe or a command of mrl in the place of the program."""
    script, rest = args.training_script, args.training_script_args
    if args.module or args.no_python or Path(script).suffix == ".py":
        return
    if Path(script).suffix in (".yaml", ".yml"):
        given = f"the recipe {script}"
        meant = shlex.join(["-m", "mrl", "train", script, *rest])
    elif script in ("mrl", "train", "serve", "eval", "replay"):
        given = f"{script!r}"
        meant = shlex.join(["-m", "mrl", *([] if script == "mrl" else [script]), *rest])
    else:
        return
    raise InputError(
        f"got {given} in the place of the program that the ranks run; write {meant} there: {EXPECTED}"
    )


def _check_flags(args: Any) -> None:
    """Raise InputError if a flag has a value that torch would refuse with a traceback, or with which no
    rank would be started."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    def are_nodes(text: str) -> bool:
        least, most = parse_min_max_nnodes(text)
        return 0 < least <= most

    def are_pairs(text: str) -> bool:
        given = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
        pairs = [(key.strip(), value.strip()) for key, _, value in given]
        ends = ("timeout", "_interval", "_attempt")
        numbers = [int(value) for key, value in pairs if key.endswith(ends)]
        is_host = dict(pairs).get("is_host", "yes").lower()
        is_word = is_host in ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")
        return is_word and min(numbers, default=1) > 0 and all(map(all, pairs))

    checks: list[tuple[str, Any, Callable[[Any], Any], str]] = [
        ("--nnodes", args.nnodes, are_nodes, "a number of nodes above 0, or MIN:MAX"),
        ("--nproc-per-node", args.nproc_per_node, lambda text: determine_local_world_size(text) > 0,
         "a number of ranks above 0, or gpu where there are GPUs"),
        ("--max-restarts", args.max_restarts, lambda number: number >= 0, "a number, 0 or above"),
        ("--monitor-interval", args.monitor_interval, lambda seconds: seconds > 0,
         "a number of seconds above 0"),
        ("--rdzv-endpoint", args.rdzv_endpoint, lambda text: parse_rendezvous_endpoint(text, 0),
         "HOST:PORT"),
        ("--rdzv-conf", args.rdzv_conf, are_pairs,
         "KEY=VALUE, or several with commas between them; timeouts in whole seconds above 0"),
    ]  # fmt: skip
    for flag, given, accepts, expected in checks:
        with suppress(ValueError, RuntimeError):
            if accepts(given):
                continue
        raise InputError(f"{flag}: got {given!r}, expected {expected}")


def _check_endpoint(args: Any) -> None:
    """Raise InputError if another program listens on the port of the rendezvous."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import get_rdzv_endpoint

    is_static = args.rdzv_backend == "static"
    if args.standalone or (is_static and not args.rdzv_endpoint and args.master_port is None):
        return  # torch chooses a free port
    if is_static or args.rdzv_backend == "c10d":
        host, port = parse_rendezvous_endpoint(get_rdzv_endpoint(args), C10D_PORT)
        if port > 0:
            check_rendezvous(host, port)


def _report(error: Any, folder: Path, killed: OomKills, hung: Failure | None) -> int:
    """Return the exit code of the launcher, and print a report if the ranks ended because of a failure.

    `error` is torch's ChildFailedError. `killed` has the kernel's counters of OOM kills, read before
    the ranks were started. `hung` is the failure of a rank that was killed because it hung while
    starting; None without such a rank.
    """
    if (folder / SAVED_FILE).exists():  # whichever rank torch reports as the first
        return ExitCode.SAVED
    number, first = _first(error)
    if (folder / OVER_FILE).exists() and first.exitcode == -signal.SIGKILL:
        return ExitCode.DONE  # the run was done, and a rank that did not exit was killed
    run = text_or_empty(folder / RUN_FILE)
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
            command=text_or_empty(folder / COMMAND_FILE) or shlex.join(_own_command()),
        )
        found = lost
        if run:
            with suppress(OSError):
                found = write_failure(run, lost)
    if found is None:  # no run, or one that had not begun: the rank has printed the reason
        return first.exitcode
    command = found.command or text_or_empty(folder / COMMAND_FILE)
    print_failure(dataclasses.replace(found, command=command))
    return found.exit_code


def _killed(rank: int, name: str, before: OomKills, found: Failure | None) -> Failure:
    """Return the failure of a rank that was killed by the signal `name`.

    `before` has the kernel's counters of OOM kills, read before the ranks were started. `found` is
    the failure that the run folder records (failure.json); None without a record.
    """
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
    """Return the number of the rank that failed first, and torch's record of its failure.

    After a failure, torch ends all other ranks with SIGTERM, and may report one of these as the first
    to fail, so ranks killed by SIGTERM are passed over. If a rank has exited because it saved a
    checkpoint and stopped, that rank is returned instead.
    """
    saved = [(n, f) for n, f in error.failures.items() if f.exitcode == ExitCode.SAVED]
    own = [(n, f) for n, f in error.failures.items() if f.exitcode != -signal.SIGTERM]
    if saved or own:
        return min(saved or own, key=lambda pair: pair[1].timestamp)
    return error.get_first_failure()


def _own_command() -> list[str]:
    """Return the command line of this process.

    The command is reported if a rank dies before any rank has written the command that continues
    the run.
    """
    return ["python", *sys.orig_argv[1:]]


def _forward(number: int, frame: Any) -> None:
    """Forward a signal to the ranks."""
    _forwarded.append(number)
    for pid in children():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _silence() -> None:
    """Suppress torchrun's own messages about failed ranks, unless LOGLEVEL is set."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
