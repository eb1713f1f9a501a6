"""Scratch folders: swept where their owner is gone, and never a live neighbour's."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mrl.errors import InputError
from mrl.system.scratch import (
    FILES_FILE,
    LOCK_FILE,
    MAX_SOCKET_BYTES,
    NEW_LOCK_FILE,
    UNLOCKED_S,
    Scratch,
    sweep,
)
from tests.waiting import wait_until

OWNER = """
import os, subprocess, sys
from mrl.system.scratch import Scratch
scratch = Scratch("sglang")
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, pass_fds=(scratch.descriptor,))
print(scratch.path, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_killed_owner_is_swept_once_its_child_is_gone_too(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert owner.stdout
    path, pid = owner.stdout.readline().split()
    assert sweep(tmp_path) == []
    owner.kill()
    owner.wait()
    assert sweep(tmp_path) == []  # the engine lives a moment longer than its trainer
    os.kill(int(pid), 9)
    wait_until(lambda: sweep(tmp_path) == [Path(path)])
    assert not list(tmp_path.iterdir())


def test_shared_memory_goes_with_the_folder(tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    for name in ("sglang_loads_dead", "sglang_loads_alive", "another"):
        (memory / name).touch()
    (tmp_path / "victim").touch()
    (memory / "link").symlink_to(tmp_path / "victim")
    alive, dead = Scratch("sglang"), Scratch("sglang")
    alive.note([memory / "sglang_loads_alive"])
    dead.note([memory / "sglang_loads_dead", memory / "link", tmp_path / "victim", memory / "no"])
    with (dead.path / FILES_FILE).open("ab") as noted:
        noted.write(b"\xff\n" + bytes(8))  # of a crash of the machine
    os.close(dead.descriptor)
    assert sweep(tmp_path, memory) == [dead.path]
    assert {each.name for each in memory.iterdir()} == {"sglang_loads_alive", "another", "link"}
    assert (tmp_path / "victim").exists()
    alive.remove()
    assert not alive.path.exists()


def test_what_is_not_a_scratch_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "mrl-notes").mkdir()  # without a lock: it may be anybody's
    (tmp_path / "mrl-file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_FILE).touch()
    (elsewhere / FILES_FILE).touch()
    (tmp_path / "mrl-link").symlink_to(elsewhere)
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_whose_owner_was_killed_before_it_was_locked_is_swept_when_it_is_old(
    tmp_path: Path,
) -> None:
    def make(name: str, *files: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        return folder

    empty = make("mrl-launch-abc_1234")
    unlocked = make("mrl-sglang-abc_1234", NEW_LOCK_FILE)
    locked = make("mrl-sglang-locked12", NEW_LOCK_FILE)  # an owner that is about to rename the file
    full = make("mrl-sglang-full1234", "file")
    other = make("mrl-drill-abc_1234")
    folders = [empty, unlocked, locked, full, other]
    with (locked / NEW_LOCK_FILE).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(tmp_path) == []  # they may be being made
        for folder in folders:
            os.utime(folder, (0, time.time() - UNLOCKED_S - 1))
        assert sweep(tmp_path) == [empty, unlocked]
    assert {*tmp_path.iterdir()} == {locked, full, other}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_another_users_folder_stays(tmp_path: Path) -> None:
    scratch = Scratch("sglang")
    os.close(scratch.descriptor)
    os.chown(scratch.path, 65534, 65534)
    assert sweep(tmp_path) == []
    os.chown(scratch.path, 0, 0)
    assert sweep(tmp_path) == [scratch.path]


def test_a_socket_in_the_folder_has_a_path_that_is_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """On both sides of the limit, and where nothing else is there."""
    short, name = Path("/dev/shm", f"{os.getpid()}-short"), "tmp12345678"
    short.mkdir()
    request.addfinalizer(lambda: shutil.rmtree(short))
    monkeypatch.setattr("mrl.system.scratch.SHORT_FOLDER", short)
    longest = MAX_SOCKET_BYTES - len("/mrl-sglang-12345678/") - len(name)
    for num_bytes, parent in ((longest, "usual"), (longest + 1, "short")):
        usual = Path("/dev/shm", f"{os.getpid()}-".ljust(num_bytes - len("/dev/shm/"), "x"))
        usual.mkdir()
        try:
            monkeypatch.setattr("tempfile.tempdir", str(usual))
            scratch = Scratch("sglang", name)
            assert scratch.path.parent == {"usual": usual, "short": short}[parent]
            if parent == "usual":
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(scratch.path / name))
            os.close(scratch.descriptor)
            assert sweep() == [scratch.path]
        finally:
            shutil.rmtree(usual)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("y" * 107)))
    monkeypatch.setattr("mrl.system.scratch.SHORT_FOLDER", tmp_path / "nowhere")
    with pytest.raises(InputError, match=rf"TMPDIR: .* bytes, expected at most {longest}, "):
        Scratch("sglang", name)
