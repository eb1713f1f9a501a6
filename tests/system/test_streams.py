"""What is printed where nobody takes it: a device that is full, a stream that is closed."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.errors import ExitCode
from mrl.run import console
from mrl.system.streams import open_missing
from tests.ranks import start_fork


def _command(
    words: list[str], folder: Path, full: tuple[int, ...], closed: tuple[int, ...]
) -> None:
    """Run a command as a process that starts with these streams, and end with its exit code."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        where = "/dev/full" if number in full else folder / name
        os.dup2(os.open(where, os.O_WRONLY | os.O_CREAT), number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    for number in closed:
        os.close(number)
        setattr(sys, {1: "stdout", 2: "stderr"}[number], None)
    code: object = 0
    try:
        main(words)
    except SystemExit as end:
        code = end.code or 0
    try:
        sys.stdout.flush()  # as Python does at its end
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(int(str(code)))


FULL = "mrl: standard output could not be written: "


@pytest.mark.parametrize(
    ("words", "full", "closed", "code", "said"),
    [
        (
            ["recipe"],
            (1,),
            (),
            ExitCode.DISK,
            f"{FULL}the disk is full; redirect it",
        ),
        (
            ["--version"],
            (1,),
            (),
            ExitCode.DISK,
            f"{FULL}its device is full",
        ),
        (["recipe"], (), (1, 2), ExitCode.DONE, ""),
        (["recipe"], (), (2,), ExitCode.DONE, ""),
        (["check", "/nope"], (2,), (), ExitCode.BAD_INPUT, ""),
        (["check", "/nope"], (1, 2), (), ExitCode.BAD_INPUT, ""),
        (["check", "/nope"], (1,), (), ExitCode.BAD_INPUT, "mrl: recipe /nope: No such file"),
    ],
)
def test_a_command_whose_streams_take_nothing(words, full, closed, code, said, tmp_path) -> None:
    fork = start_fork(_command, words, tmp_path, full, closed)
    fork.join()
    assert fork.exitcode == code
    shown = (tmp_path / "stderr").read_text() if 2 not in full else ""
    assert shown.startswith(said)
    assert shown.count("\n") == bool(said)


def test_a_stream_escapes_what_its_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    open_missing()
    console.pairs([("prompt", "\u6f22 caf\u00e9")])
    print("\u6f22", flush=True)
    assert raw.getvalue().split() == [b"prompt", b"\\u6f22", b"caf\\xe9", b"\\u6f22"]
