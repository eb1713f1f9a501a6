"""The new lines of a file, whatever happens to it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from mrl.view.live import tail as tail_module
from mrl.view.live.tail import Tail


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_lines_come_once_and_whole(file: Path) -> None:
    tail = Tail(file)
    assert tail.poll().is_missing
    file.write_bytes(b"a\nb\nc")
    news = tail.poll()
    assert (news.lines, news.is_new) == ([b"a", b"b"], True)
    assert not tail.poll().lines
    with file.open("ab") as stream:
        stream.write(b"c\n\xff\xfe\n")
    news = tail.poll()
    assert (news.lines, news.is_new) == ([b"cc", b"\xff\xfe"], False)


def test_a_rotated_file_is_read_to_its_end(file: Path) -> None:
    tail = Tail(file)
    file.write_bytes(b"a\n")
    tail.poll()
    with file.open("ab") as stream:
        stream.write(b"b\n")
        file.rename(file.with_suffix(".1"))
        stream.write(b"c\n")
    file.write_bytes(b"d\n")
    assert [tail.poll().lines, tail.poll().lines] == [[b"b", b"c"], [b"d"]]
    file.unlink()
    assert tail.poll().is_missing
    file.write_bytes(b"e\n")
    news = tail.poll()
    assert (news.lines, news.is_new, news.is_missing) == ([b"e"], True, False)


@pytest.mark.parametrize("content", [b"x\n", b"xxxx\nyyyy\nzzzz\n"])
def test_a_file_that_was_cut_or_rewritten_in_place_begins_anew(file: Path, content: bytes) -> None:
    tail = Tail(file)
    file.write_bytes(b"aaaa\nbbbb\n")
    tail.poll()
    with file.open("r+b") as stream:
        stream.truncate(0)
        stream.write(content)
    os.utime(file, ns=(1, 1))  # the clock of the file may stand still
    news = tail.poll()
    assert (news.lines, news.is_new) == (content.split(), True)
    assert not tail.poll().lines


def test_a_line_that_is_too_long_is_skipped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(tail_module, "READ_BYTES", 64)
    file.write_bytes(b"a\n" + b"x" * 1000 + b"\nb\n")
    tail, lines, skipped = Tail(file), [], 0
    while (news := tail.poll()).is_behind or news.lines:
        lines += news.lines
        skipped += news.num_skipped
    assert (lines, skipped) == ([b"a", b"b"], 1)


@pytest.mark.timeout(20)
def test_what_is_no_file_is_missing(file: Path) -> None:
    os.mkfifo(file)  # opening it would wait
    tail = Tail(file)
    assert tail.poll().is_missing
    file.unlink()
    file.mkdir()
    assert tail.poll().is_missing


def test_what_is_not_read_any_more_is_closed(file: Path) -> None:
    """The pages of tenants are opened and forgotten again while the server runs."""
    file.write_bytes(b"a\n")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        Tail(file).poll()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before + 25
