"""The `mrl COMMAND` command line.

mrl/errors.py defines the exit codes.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from mrl.commands import ALL
from mrl.commands.foreign_commands import hint_for
from mrl.errors import ExitCode, InputError, RunFailed
from mrl.system.disk import refusal
from mrl.system.printable import escape
from mrl.system.streams import is_closed_pipe, open_missing, silence_unwritable
from mrl.system.threads import compute_with_one_thread
from mrl.version import __version__


def main(argv: list[str] | None = None) -> None:
    """Run the command line. This is the entry point of `mrl` and `python -m mrl`.

    If the reader of standard output has closed the pipe (`mrl recipe | head`), the command ends
    without a message, like a program that SIGPIPE kills.
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
        if not is_closed_pipe(sys.stdout):  # another pipe broke, to an engine or worker
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(ExitCode.BROKEN_PIPE)
    except KeyboardInterrupt:  # before the command began, or when it was over
        sys.exit(ExitCode.INTERRUPTED)


def _flush(*, is_done: bool) -> None:
    """Flush standard output and standard error. If the command succeeded (`is_done`) but its output
    could not be written, print a message and exit with `ExitCode.DISK`.

    Raises BrokenPipeError if the reader of standard output has closed the pipe.
    """
    if (names := silence_unwritable()) and is_done:
        _print_error(f"mrl: {names} could not be written: its device is full")
        sys.exit(ExitCode.DISK)
    sys.stdout.flush()  # raises BrokenPipeError if the reader has closed the pipe


def _print_error(text: str) -> None:
    """Print a line to standard error. A failed write is ignored."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _run(argv: list[str] | None) -> None:
    compute_with_one_thread()
    args = _parse(argv)
    try:
        args.run(args)
    except InputError as error:
        rank = os.environ.get("RANK", "0")
        _print_error(f"mrl: {'' if rank == '0' else f'[rank {rank}] '}{escape(str(error))}")
        sys.exit(ExitCode.BAD_INPUT)
    except RunFailed as error:
        from mrl.jobs.report import show

        with suppress(OSError):  # standard error itself may be unwritable
            if not show(error):
                _print_error(f"mrl: {escape(str(error))}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        raise
    except Exception as error:
        if text := refusal(error, Path.cwd()):
            _print_error(f"mrl: {escape(text)}")
            sys.exit(ExitCode.DISK)
        if args.only_reads and isinstance(error, OSError) and error.filename is not None:
            _print_error(f"mrl: {escape(os.fsdecode(error.filename))}: {error.strerror}")
            sys.exit(ExitCode.BAD_INPUT)
        from mrl.jobs.report import show

        with suppress(OSError):
            traceback.print_exception(error)
            show(error)
        sys.exit(ExitCode.UNFORESEEN)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"mrl: interrupted; {args.after_interrupt}", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line (`sys.argv[1:]` if `argv` is None) like argparse, but also accept
    `key=value` overrides after options.

    If it cannot be parsed, print one line and exit with `ExitCode.BAD_INPUT`.
    """
    words, parser = sys.argv[1:] if argv is None else argv, _parser()
    parser.set_defaults(after_interrupt="no partial output remains", only_reads=False)
    try:
        args, rest = parser.parse_known_args(words)
        if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
            words = rest
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except _Misuse as error:
        message, program = error.args
        hint = "" if message.startswith("argument -") else hint_for(words)  # argparse explains it
        if not hint and message.startswith("argument COMMAND"):
            hint = _nearest_command(words[0], message)
        if os.environ.get("RANK", "0") == "0":  # all ranks have the same words
            print(f"mrl: {message}{hint}; see {program} --help", file=sys.stderr)
        sys.exit(ExitCode.BAD_INPUT)
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _nearest_command(word: str, message: str) -> str:
    """Return a question with the command that resembles `word`; empty if none does. `message` is
    argparse's, which lists all commands in quotes."""
    names = re.findall(r"'([\w-]+)'", message.partition("choose from")[2])
    near = difflib.get_close_matches(word, names, n=1)
    return f"; did you mean mrl {near[0]}?" if near else ""


class _Misuse(Exception):
    """A command line that cannot be parsed. The exception has two arguments: the reason, and the
    name of the program or subcommand whose --help explains more."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises `_Misuse`, which `_parse` reports in one line."""

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
