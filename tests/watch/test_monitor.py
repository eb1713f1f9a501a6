"""The monitor as a process: how it ends, and what cannot hold it up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.run.failure import LAUNCH_FOLDER, read_failure
from mrl.system import heartbeat
from mrl.system.heartbeat import Pulse
from mrl.watch import monitor, start
from mrl.watch.line import Head, Node
from mrl.watch.monitor import DONE
from mrl.watch.verdict import Verdict

STOPPED = Verdict(0, "stopped", Pulse("train", 3, 9, 40), 5.0, 4.0)


@pytest.fixture
def page() -> Iterator[str]:
    yield heartbeat.open_page()
    heartbeat.close_page()


def job(page: str, stacks: str, **more: Any) -> bytes:
    rank = {"rank": 1, "pid": os.getpid(), "page": page, "stacks": stacks}
    said = {"parent": os.getpid(), "ranks": [rank], "folder": "", "command": "", **more}
    return json.dumps(said).encode() + b"\n"


@pytest.mark.parametrize("last", [DONE, b""], ids=["done", "failed"])
def test_only_a_rank_that_is_done_says_bye(page: str, tmp_path: Path, last: bytes) -> None:
    """The node of a rank that fails or is killed must not look like one that is through."""
    (tmp_path / "stacks").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("there", [1])
        head = Head(server, "secret", [node])
        other_port = socket.create_server(("127.0.0.1", 0))
        addresses = [["127.0.0.1", each.getsockname()[1]] for each in (other_port, server)]
        other_port.close()  # nobody listens at the first of the addresses
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", start._MONITOR], stdin=subprocess.PIPE
        )
        assert process.stdin
        line = {"node": 0, "token": "secret", "addresses": addresses, "host": "here"}
        process.stdin.write(job(page, str(tmp_path / "stacks"), **line))
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not node.was_heard:
            head.poll(0.0)
            assert time.monotonic() < deadline
        process.stdin.write(last)
        process.stdin.close()
        assert process.wait(60) == 0
        head.poll(0.0)
        assert node.has_left == (last == DONE)


def test_a_disk_that_hangs_does_not_keep_the_ranks_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    fifo = tmp_path / "checkpoints/latest_checkpointed_iteration.txt"
    os.mkfifo(fifo)  # whoever opens it waits
    monkeypatch.setattr(monitor, "REPORT_S", 0.1)
    monkeypatch.setenv(LAUNCH_FOLDER, str(tmp_path))
    killed: list[object] = []
    monkeypatch.setattr(monitor, "kill", lambda ranks, last: killed.append(last))
    monitor.end({"folder": str(tmp_path), "command": "again", "parent": 7}, [], STOPPED, None, [])
    assert killed == [7]
    assert "rank 0 is stopped (SIGSTOP)" in capsys.readouterr().err
    assert read_failure(tmp_path) is None
    fifo.write_text("2")  # lets the thread go on
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.daemon:
            thread.join(10)


def test_a_terminal_that_nobody_reads_does_not_keep_the_ranks_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        encoding = "utf-8"

        def write(self, text: str) -> None:
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.delenv(LAUNCH_FOLDER, raising=False)
    killed: list[object] = []
    monkeypatch.setattr(monitor, "kill", lambda ranks, last: killed.append(last))
    monitor.end({"folder": str(tmp_path), "command": "again", "parent": 7}, [], STOPPED, None, [])
    assert killed == [7]
    found = read_failure(tmp_path)
    assert found is not None
    assert (found.exit_code, found.phase) == (72, "train")


@pytest.mark.parametrize(
    ("code", "is_over", "is_said"), [(3, False, True), (3, True, False), (0, False, False)]
)
def test_a_monitor_that_dies_is_reported(
    code: int, is_over: bool, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    if is_over:
        over.set()
    start._mind(subprocess.Popen(["sh", "-c", f"exit {code}"]), over)
    text = f"mrl: the watchdog of this node ended with code {code}; a rank that hangs"
    assert (text in capsys.readouterr().err) == is_said
