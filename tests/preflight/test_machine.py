"""What a machine must have before a start: one line each where it has not."""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.errors import InputError
from mrl.preflight import machine
from parallel.mesh import skew_in_words


@pytest.mark.parametrize(
    ("limits", "raised"), [((64, 64), None), ((64, 4096), 256), ((1024, 4096), 0), ((-1, -1), 0)]
)
def test_open_files(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: int | None
) -> None:
    done: list[Any] = []
    fake = SimpleNamespace(
        getrlimit=lambda what: limits,
        setrlimit=lambda what, new: done.append(new[0]),
        RLIM_INFINITY=-1,
        RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
    )
    monkeypatch.setattr(machine, "resource", fake)
    if raised is None:
        with pytest.raises(InputError, match=r"64 open files \(ulimit -n\), expected at least 256"):
            machine.check_open_files()
    else:
        machine.check_open_files()
    assert done == ([raised] if raised else [])


def test_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.check_loopback()

    def refused(*args: Any) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refused)
    with pytest.raises(
        InputError, match=r"127.0.0.1 fails \(Network is unreachable\).*ip link set"
    ):
        machine.check_loopback()


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="none is not a folder that this user may write to"):
        machine.check_shared_memory(1, tmp_path / "none")
    found = SimpleNamespace(f_bavail=16, f_frsize=1 << 20)
    monkeypatch.setattr(machine.os, "statvfs", lambda place: found)
    machine.check_shared_memory(1, tmp_path)
    with pytest.raises(InputError, match=r"16 MiB free, expected at least 32 MiB for 2 rank"):
        machine.check_shared_memory(2, tmp_path)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up GPUs."""
    said: list[str] = []
    machine.check_gpus(2, 2, lambda a, b: True, said.append)
    machine.check_gpus(1, 2, lambda a, b: False, said.append)
    assert said == []
    machine.check_gpus(3, 4, lambda a, b: {a, b} != {0, 2}, said.append)
    assert "GPU 0 cannot access the memory of GPU 2 (2 of 6 pairs)" in said[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(InputError, match=r"2 ranks on this node, but 1 GPU.*DEVICES=0"):
        machine.check_gpus(2, 1, lambda a, b: True, said.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.local_ranks(16, 8) == 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert [machine.local_ranks(16, 8), machine.local_ranks(2, 8), machine.local_ranks(2, 0)] == [
        8, 2, 1,
    ]  # fmt: skip


def test_clocks_of_nodes() -> None:
    near = [("a", 100.0), ("a", 103.0), ("b", 104.9)]
    assert skew_in_words(near) == ""
    assert skew_in_words([("a", 0.0), ("a", 9.0)]) == ""  # one clock: a rank was slow
    assert "the clock of b is 60 s ahead of that of a" in skew_in_words([*near, ("b", 160.0)])
