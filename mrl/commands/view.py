"""`mrl view FOLDER... [--output FILE] [--steps a:b] [--max-samples N]` writes an HTML page of a run, of
a service, or of several runs. `mrl view --follow FOLDER... [--port N]` serves a live page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.system.files import bytes_in_words, write_whole
from mrl.system.printable import escape

MAX_SAMPLES = 16


def add_to(commands: Any) -> None:
    command = commands.add_parser(
        "view",
        help="show a run's curves and samples: one HTML file, or a live page",
        description="Write a run as one HTML file with its curves, samples and diagnosis, or a service "
        "with its tenants and curves. With several runs, compare their outcomes, curves and recipes. "
        "The file opens in any browser, without a server or a network. With --follow, serve a page on "
        "this machine that shows what happens as it happens.",
    )
    command.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="output_dir of a run or of a service, or of several runs to compare",
    )
    command.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write; by default RUN/view.html, or RUN/compare.html in the first of several "
        "runs",
    )
    command.add_argument(
        "--steps",
        metavar="A:B",
        help="show samples and timeline of steps A to B-1; by default samples of at most 12 steps",
    )
    command.add_argument(
        "--max-samples",
        type=int,
        metavar="N",
        help=f"samples of a step at most (default {MAX_SAMPLES})",
    )
    command.add_argument(
        "--follow",
        action="store_true",
        help="serve a page that follows the run, on 127.0.0.1, until Ctrl-C; write no file",
    )
    command.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="port of the page that --follow serves; by default a free one",
    )
    command.set_defaults(run=run, only_reads=True, after_interrupt="the page is no longer served")


def run(args: argparse.Namespace) -> None:
    if args.follow:
        follow(args)
        return
    if args.port is not None:
        raise InputError("--port is for the page that --follow serves; give both, or neither")
    from mrl.view.render import COMPARISON, RUN, SERVICE, render
    from mrl.view.service import is_service

    folder = args.folders[0]
    if len(args.folders) > 1:
        target, kind, data = args.output or folder / "compare.html", COMPARISON, _compare(args)
    elif is_service(folder):
        target = args.output or folder / "view.html"
        kind, data = SERVICE, _read_service(args, target)
    else:
        target, kind, data = args.output or folder / "view.html", RUN, _read_run(args)
    # A name from JSON or a path may contain a lone surrogate, which is replaced by `?`.
    page = render(data, kind).encode("utf-8", errors="replace")
    write(target, page)
    for note in data["notes"]:
        print(escape(note))
    shown = escape(str(target))
    print(
        f"wrote {shown}, {bytes_in_words(len(page))}: open it in a browser, here or copied elsewhere"
    )


def follow(args: argparse.Namespace) -> None:
    """Serve the page until this process is interrupted."""
    for name in ("output", "steps", "max_samples"):
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} is for the page as a file; leave it out, or --follow")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise InputError(f"--port is {args.port}; expected 0 to 65535")
    from mrl.view.live.server import LiveServer

    with LiveServer(args.folders, args.port or 0) as server:
        shown = ", ".join(escape(str(folder)) for folder in args.folders)
        print(f"following {shown}: {server.url}")
        print(f"from another machine: {server.forward}, then open the same address; Ctrl-C ends it",
              flush=True)  # fmt: skip
        server.serve()


def _read_run(args: argparse.Namespace) -> dict[str, Any]:
    max_samples = MAX_SAMPLES if args.max_samples is None else args.max_samples
    if max_samples < 0:
        raise InputError(f"--max-samples is {max_samples}; expected 0 or more")
    steps = None if args.steps is None else read_steps(args.steps)
    from mrl.view.collect import collect

    return collect(args.folders[0], steps, max_samples)


def _read_service(args: argparse.Namespace, target: Path) -> dict[str, Any]:
    _refuse_samples(
        args,
        f"{args.folders[0]} is the folder of a service, which has none; give it with the folder of a "
        "tenant's run",
    )
    from mrl.view.service import collect_service

    return collect_service(args.folders[0], target)


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    _refuse_samples(args, "a comparison shows none; give it with one run")
    from mrl.view.compare import collect_comparison

    return collect_comparison(args.folders)


def _refuse_samples(args: argparse.Namespace, why: str) -> None:
    """Raise InputError if an option that selects samples is given. The message ends with `why`."""
    for name in ("steps", "max_samples"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} selects samples, and {why}")


def read_steps(text: str) -> range:
    """Parse a half-open range of steps: `a:b`, `a:`, `:b`, or the single step `a`. Raises InputError
    for any other text."""
    start, colon, stop = text.partition(":")
    try:
        first = int(start or 0)
        end = int(stop) if stop else (10**9 if colon else first + 1)
    except ValueError:
        first, end = 0, 0
    if not 0 <= first < end or not text.strip(":"):
        raise InputError(f"--steps {text}: expected A:B with A < B, such as 10:20, 10: or :20")
    return range(first, end)


def write(target: Path, page: bytes) -> None:
    """Write an HTML page to the file `target` atomically, because a browser may have the file open.

    Raises InputError if the file cannot be written.
    """
    if target.is_dir():
        file = target / "view.html"
        raise InputError(f"--output {target}: it is a folder; give a file, such as {file}")
    try:
        write_whole(target, page)
    except OSError as error:
        raise InputError(f"--output {target}: {error.strerror}; choose another file") from None
