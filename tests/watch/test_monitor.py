"""The monitor as a process: how it ends, and what cannot hold it up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ExitCode
from mrl.run.failure import OVER_FILE, Failure, read_failure, write_failure
from mrl.system import heartbeat
from mrl.system.heartbeat import Pulse
from mrl.system.launcher import LAUNCH_FOLDER
from mrl.watch import monitor, restarted
from mrl.watch.connection import MonitorServer, Node
from mrl.watch.process import ALL_STACKS, MAIN_STACK, Process, innermost, stacks_of
from mrl.watch.ticks import DONE
from mrl.watch.verdict import Verdict

LIMITS = {"given": {}, "least": {}, "first_s": 60.0}
STOPPED = Verdict(0, "stopped", Pulse("train", 3, 9, 40), 5.0, 4.0)


@pytest.fixture
def page() -> Iterator[str]:
    yield heartbeat.open_page()
    heartbeat.close_page()


def job(page: str, stacks: str, **more: Any) -> bytes:
    rank = {"rank": 1, "pid": os.getpid(), "page": page, "stacks": stacks}
    folder = str(Path(stacks).parent)
    said = {"parent": os.getpid(), "ranks": [rank], "folder": folder, "command": "", **more}
    return json.dumps(said).encode() + b"\n"


@pytest.mark.parametrize("last", [DONE, b""], ids=["done", "failed"])
def test_only_a_rank_that_is_done_says_bye(page: str, tmp_path: Path, last: bytes) -> None:
    """The node of a rank that fails or is killed must not look like one that is through."""
    (tmp_path / "stacks").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("there", [1])
        head = MonitorServer(server, "secret", [node])
        other_port = socket.create_server(("127.0.0.1", 0))
        addresses = [["127.0.0.1", each.getsockname()[1]] for each in (other_port, server)]
        other_port.close()  # nobody listens at the first of the addresses
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", restarted.PROGRAM], stdin=subprocess.PIPE
        )
        assert process.stdin
        line = {"node": 0, "token": "secret", "addresses": addresses, "host": "here"}
        process.stdin.write(job(page, str(tmp_path / "stacks"), **line))
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not node.was_heard:
            head.poll(0.0)
            assert time.monotonic() < deadline
        if last == DONE:
            heartbeat.leave()
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
    before = set(threading.enumerate())
    monitor.end({"folder": str(tmp_path), "command": "again", "parent": 7}, [], STOPPED, None, [])
    assert killed == [7]
    assert "rank 0 is stopped (SIGSTOP)" in capsys.readouterr().err
    assert read_failure(tmp_path) is None
    waited_for = fifo.rename(tmp_path / "fifo")
    fifo.write_text("2")
    waited_for.write_text("2")  # lets the thread go on, which reads the file once more
    for thread in set(threading.enumerate()) - before:  # those of pytest-xdist never end
        thread.join(10)


def test_the_report_is_written_before_all_threads_write_their_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which can crash a rank, and the monitor dies with rank 0."""
    before: dict[int, Failure | None] = {}

    def stacks_of(ranks: list[Process], asks: int) -> dict[int, str]:
        before[asks] = read_failure(tmp_path)
        text = "Stack (most recent call first):\n  File a.py, line 1 in f\n"
        return {0: text if asks == MAIN_STACK else f"{text}and others\n"}

    monkeypatch.setattr(monitor, "stacks_of", stacks_of)
    monkeypatch.setattr(monitor, "kill", lambda ranks, last: None)
    monitor.end({"folder": str(tmp_path), "command": "again", "parent": 7}, [], STOPPED, None, [])
    assert before[MAIN_STACK] is None
    found = before[ALL_STACKS]
    assert found is not None
    assert (found.exit_code, found.rank, found.phase) == (72, 0, "train")
    assert found.log_tail[-1] == "  File a.py, line 1 in f"
    assert Path(found.log).read_text().endswith("and others\n")
    crashed = Failure("rank 0 was killed by SIGSEGV", ExitCode.LOST_RANK, rank=0)
    assert write_failure(tmp_path, crashed) == found


CHANGES = """
import signal, sys, threading, time
from contextlib import ExitStack
from mrl.watch.process import ALL_STACKS, MAIN_STACK
from mrl.watch.start import _write_stacks_on_signal
def begin_and_end():
    while True:
        threads = [threading.Thread(target=len, args=("",)) for _ in range(4)]
        [each.start() for each in threads]
        [each.join() for each in threads]
if sys.argv[1:] == ["blocked"]:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
else:
    for _ in range(3):
        threading.Thread(target=begin_and_end, daemon=True).start()
def waits():
    if sys.argv[1:] == ["blocked"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {MAIN_STACK, ALL_STACKS})
    time.sleep(600)
with ExitStack() as stack:
    print(_write_stacks_on_signal(stack), flush=True)
    waits()
"""


def test_a_stopped_rank_writes_the_stack_of_its_main_thread(page: str) -> None:
    """However often threads begin and end meanwhile; a request for all threads can crash it then."""
    process = subprocess.Popen([sys.executable, "-c", CHANGES], stdout=subprocess.PIPE)
    found = ""
    try:
        assert process.stdout is not None
        rank = Process.open(0, process.pid, page, process.stdout.readline().decode().strip())
        for number in range(10):
            time.sleep(0.05)
            process.send_signal(signal.SIGSTOP)
            (found,) = stacks_of([rank], MAIN_STACK).values()
            assert (found.count("Stack ("), found.count("in waits")) == (number + 1, number + 1)
            assert "in waits" in innermost(found)[1]
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert rank.read_stacks() == found  # also after its end


def test_a_main_thread_that_takes_no_signals_is_seen_by_another(page: str) -> None:
    """As in vfork, while a disk hangs."""
    command = [sys.executable, "-c", CHANGES, "blocked"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            rank = Process.open(0, process.pid, page, process.stdout.readline().decode().strip())
            time.sleep(0.5)  # it blocks them after the line
            assert stacks_of([rank], MAIN_STACK) == {}
            assert "in waits" in stacks_of([rank], ALL_STACKS)[0]
        finally:
            process.kill()


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


def test_a_monitor_that_is_lost_is_replaced_and_the_last_one_is_reported(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarted, "LOOK_S", 0.05)
    monkeypatch.setattr(restarted, "STOPPED_S", 0.1)
    monkeypatch.setattr(restarted, "MAX_STARTS", 3)
    said = json.loads(job(page, str(tmp_path / "none"), nodes=[])) | {"parent": os.getpid()}
    watched = restarted.RestartedMonitor(said | {"limits": LIMITS, "ranks": []})
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        while (pid := watched._process.pid) in seen:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        seen.add(pid)
        os.kill(pid, number)
    while (text := capsys.readouterr().err).count("only timeouts of collectives apply") == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert text or seen
    watched.close()
    done = restarted.RestartedMonitor(said | {"limits": LIMITS, "ranks": []})
    done.finish()  # no other rank is there
    done.close()
    assert done._process.wait(10) == 0
    assert capsys.readouterr().err == ""


def test_a_rank_that_leads_engines_is_watched_after_the_run(page: str, tmp_path: Path) -> None:
    """A finished job would wait for ever where its supervisor is stopped."""
    (tmp_path / "stacks").touch()
    leads = heartbeat._Page()
    leads.phase = heartbeat.SUPERVISE
    leads.write()
    sleeper = subprocess.Popen(["sleep", "600"])
    sleeper.send_signal(signal.SIGSTOP)
    own = {"rank": 0, "pid": os.getpid(), "page": page, "stacks": str(tmp_path / "stacks")}
    path = f"/proc/{os.getpid()}/fd/{leads.fd}"
    other = {"rank": 1, "pid": sleeper.pid, "page": path, "stacks": str(tmp_path / "stacks")}
    limits = LIMITS | {"given": {heartbeat.SUPERVISE: 0.5}}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", restarted.PROGRAM],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, LAUNCH_FOLDER: str(tmp_path)},
    )
    said = {"parent": os.getpid(), "ranks": [own, other], "folder": str(tmp_path)}
    said |= {"command": "", "nodes": []}
    assert process.stdin
    process.stdin.write(json.dumps(said | {"limits": limits}).encode() + b"\n" + DONE)
    process.stdin.flush()
    heartbeat.leave()  # rank 0 has done all steps
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 0, printed
    assert b"rank 1 is stopped (SIGSTOP)" in printed
    assert b"the run is done, so the rank is killed" in printed
    assert sleeper.wait(10) == -signal.SIGKILL
    assert (tmp_path / OVER_FILE).exists()


LOADS = """
import signal, sys, time
from mrl.system import heartbeat
from mrl.watch.process import ALL_STACKS, MAIN_STACK
signal.signal(MAIN_STACK, signal.SIG_IGN)
signal.signal(ALL_STACKS, signal.SIG_IGN)
print(heartbeat.open_page(), flush=True)
file, num = sys.argv[1], int(sys.argv[2])
with heartbeat.phase("load"):
    time.sleep(0.5)
with heartbeat.phase("load:checkpoint"), open(file, "rb", buffering=0) as stream:
    for _ in range(num):
        stream.read(1 << 16)
        time.sleep(0.5)
    if num < 20:
        time.sleep(600)  # the disk hangs
heartbeat.leave()
"""


@pytest.mark.release
@pytest.mark.parametrize("num", [24, 6], ids=["slow", "hangs"])
def test_a_slow_load_is_no_hang_and_one_that_hangs_is_found(num: int, tmp_path: Path) -> None:
    """The checkpoint takes 24 times longer than the weights, and 4 times longer than the limit."""
    (tmp_path / "shard").write_bytes(bytes(num << 16))
    (tmp_path / "stacks").touch()
    words = [sys.executable, "-c", LOADS, str(tmp_path / "shard"), str(num)]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert rank.stdout
    own = {"rank": 0, "pid": rank.pid, "page": rank.stdout.readline().strip()}
    limits = LIMITS | {"given": {"load": 3.0}}
    said = {"parent": os.getpid(), "folder": str(tmp_path), "command": "", "nodes": []}
    said |= {"ranks": [own | {"stacks": str(tmp_path / "stacks")}], "limits": limits}
    monitor = restarted.RestartedMonitor(said)
    begin = time.monotonic()
    code = rank.wait(60)
    monitor.finish()
    monitor.close()
    found = read_failure(tmp_path)
    if num == 24:
        assert (code, found) == (0, None)
        assert time.monotonic() - begin > 12
        return
    assert code == -signal.SIGKILL
    assert found is not None
    assert (found.exit_code, found.phase) == (72, "load:checkpoint")
    assert found.since_s is not None
    assert 3 < found.since_s < 6
