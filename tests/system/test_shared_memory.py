"""Memory shared by processes: read while its owner lives, and gone with it."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

from mrl.system.shared_memory import SharedBytes


def test_memory_of_another_process() -> None:
    """Read while it lives; gone, with nothing left anywhere, when it is killed."""
    before = set(os.listdir("/dev/shm"))
    shared = SharedBytes()
    values = torch.arange(200, dtype=torch.uint8)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(told)
            own = SharedBytes()
            own.write(10, values)
            os.write(tell, f"{own.handle.fd} {own.handle.nonce.hex()} {own.num_bytes}".encode())
            signal.pause()
        finally:
            os._exit(1)  # never into pytest, of which this is a copy
    os.close(tell)  # a child that fails ends the read below
    try:
        fd, nonce, num_bytes = os.read(told, 200).decode().split()
        handle = type(shared.handle)(child, int(fd), bytes.fromhex(nonce))
        assert num_bytes == "210"
        assert handle.can_be_read()
        assert not type(handle)(child, int(fd), b"x" * 16).can_be_read()
        parts = [torch.empty(n, dtype=torch.uint8) for n in (3, 7)]
        handle.read([(10, parts[0]), (100, parts[1])])
        assert torch.equal(parts[0], values[:3])
        assert torch.equal(parts[1], values[90:97])
        with pytest.raises(RuntimeError, match="moved 5 bytes, expected 7"):
            handle.read([(205, parts[1])])
    finally:
        os.close(told)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not handle.can_be_read()
    with pytest.raises(RuntimeError, match=f"memory shared by process {child}"):
        handle.read([(0, parts[0])])
    ours = {str(os.getpid()), str(child)}  # others make and remove files there meanwhile
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if ours & set(re.findall(r"\d+", name))]


def test_cleared_memory_is_given_back() -> None:
    shared = SharedBytes()
    shared.write(0, torch.ones(1000, dtype=torch.uint8))
    shared.clear()
    assert shared.num_bytes == 0
    assert shared.handle.can_be_read()
