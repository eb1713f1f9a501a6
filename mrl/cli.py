"""Runs `mrl COMMAND`.

The exit codes are those of mrl/errors.py.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from mrl import __version__
from mrl.commands import ALL
from mrl.commands.foreign_commands import hint_for
from mrl.commands.report import show
from mrl.errors import ExitCode, InputError, RunFailed
from mrl.run.console import escape
from mrl.system.disk import refusal
from mrl.system.streams import open_missing, silence_unwritable


def main(argv: list[str] | None = None) -> None:
    """Run the command line: the entry point of `mrl` and `python -m mrl`.

    A command whose reader has left (`mrl recipe | head`) ends without a message, as those that
    SIGPIPE kills do.
    """
    open_missing()
    try:
        try:
            _run(argv)
        except SystemExit as end:  # also after --help
            _flush(is_done=not end.code)
            raise
        _flush(is_done=True)
    except BrokenPipeError:
        if not _is_closed(sys.stdout.fileno()):  # that of an engine or a worker
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again
        sys.exit(ExitCode.NOBODY_READS)


def _flush(*, is_done: bool) -> None:
    """Flush what was printed. If a stream cannot be written to, the command fails even if it was
    done."""
    if (names := silence_unwritable()) and is_done:
        _say(f"mrl: {names} could not be written: its device is full")
        sys.exit(ExitCode.DISK)
    sys.stdout.flush()  # raises BrokenPipeError where nobody reads any more


def _say(text: str) -> None:
    """Print a line to standard error, if that can be written to."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _is_closed(fd: int) -> bool:
    """Whether `fd` is the end of a pipe that nobody reads."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: list[str] | None) -> None:
    _use_one_thread()
    args = _parse(argv)
    try:
        args.run(args)
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        _say(f"mrl: {'' if rank == '0' else f'[rank {rank}] '}{escape(str(error))}")
        sys.exit(ExitCode.BAD_INPUT)
    except RunFailed as error:
        with suppress(OSError):  # standard error may be what cannot be written
            if not show(error):
                _say(f"mrl: {escape(str(error))}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        raise
    except Exception as error:
        if text := refusal(error, Path.cwd()):
            _say(f"mrl: {escape(text)}")
            sys.exit(ExitCode.DISK)
        if args.only_reads and isinstance(error, OSError) and error.filename is not None:
            _say(f"mrl: {escape(os.fsdecode(error.filename))}: {error.strerror}")
            sys.exit(ExitCode.BAD_INPUT)
        with suppress(OSError):
            traceback.print_exception(error)
            show(error)
        sys.exit(ExitCode.UNFORESEEN)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: interrupted; {args.after_interrupt}", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)


def _use_one_thread() -> None:
    """Compute with one thread, as torchrun does, unless OMP_NUM_THREADS is set: two threads make small
    products on CPUs many times slower, and another number of threads adds up in another order."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # of child processes
        torch.set_num_threads(1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse as argparse does; `key=value` may also come after options."""
    words, parser = sys.argv[1:] if argv is None else argv, _parser()
    parser.set_defaults(after_interrupt="no partial output remains", only_reads=False)
    try:
        args, rest = parser.parse_known_args(words)
        if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
            words = rest
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except _Misuse as error:
        message, program = error.args
        hint = "" if message.startswith("argument -") else hint_for(words)  # an option of ours
        print(f"mrl: {message}{hint}; see {program} --help", file=sys.stderr)
        sys.exit(ExitCode.BAD_INPUT)
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


class _Misuse(Exception):
    """A command line that cannot be parsed: why, and the program or command whose help says more."""


class _Parser(argparse.ArgumentParser):
    """Reports bad input in one line, which `_parse` prints."""

    def error(self, message: str) -> NoReturn:
        raise _Misuse(message, self.prog)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mrl",
        description="Reinforcement learning for mixture-of-experts language models: Megatron-core "
        "trains, SGLang generates.",
        epilog="Try it: mrl toy-model toy/model, then mrl train launch/recipes/toy_moe.yaml. Each "
        "command explains itself: mrl COMMAND --help.",
    )
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in ALL:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    main()
