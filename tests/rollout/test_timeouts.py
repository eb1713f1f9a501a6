"""How long a control call of an engine may take: configured at first, learned afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from mrl.engines.base import EngineLost
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.http import TIMES_LONGEST, CallTimeouts, HttpClient
from mrl.engines.sglang.process import ServerProcess


def test_the_first_call_has_the_time_of_a_start_and_later_ones_what_they_took() -> None:
    patience = CallTimeouts(first_s=600.0, least_s=120.0)
    assert patience.limit_s("/a") == 600.0
    patience.note("/a?timeout=3", 2.0)
    assert patience.limit_s("/a") == 120.0
    assert patience.limit_s("/b") == 600.0
    patience.note("/a", 100.0)
    patience.note("/a", 1.0)
    assert patience.limit_s("/a?timeout=4") == TIMES_LONGEST * 100.0
    assert CallTimeouts(first_s=5.0, least_s=60.0).limit_s("/a") == 60.0


def test_a_server_that_accepts_and_is_silent_is_lost_within_its_limit(tmp_path: Path) -> None:
    """The kernel accepts connections for a server whose processes are stopped, too."""
    server = ServerConnection({}, {}, tmp_path / "log", CallTimeouts(first_s=0.4, least_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        server.client = HttpClient(mute.getsockname()[1], "key")
        with pytest.raises(EngineLost, match=r"/weights_checker within 0\.4 s"):
            server.post("/weights_checker", {})
        server._timeouts.note("/weights_checker", 0.01)
        server.client = HttpClient(mute.getsockname()[1], "key")
        with pytest.raises(EngineLost, match=r"/weights_checker within 0\.2 s"):
            server.post("/weights_checker", {})


def test_a_server_that_takes_no_request_is_lost(tmp_path: Path) -> None:
    """It is stopped: the kernel still answers for it, and takes as much as a socket holds."""
    server = ServerConnection({}, {}, tmp_path / "log", CallTimeouts(60.0, 0.3))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.client = HttpClient(listener.getsockname()[1], "key")
        with pytest.raises(
            EngineLost, match=r"accepted no request in rollout\.stall_timeout_s=0\.3 s"
        ):
            server.stream({"input_ids": [0] * 5_000_000})


def test_a_part_that_is_stopped_is_named_after_the_limit(tmp_path: Path) -> None:
    """What was not looked at does not count: the trainer may have been stopped, too."""
    process = ServerProcess({}, {}, tmp_path / "log")
    part = subprocess.Popen(["sleep", "600"])
    process._parts = {part.pid: psutil.Process(part.pid)}
    try:
        process._looked -= 1.0
        assert process.halted_part(1.5) is None
        part.send_signal(signal.SIGSTOP)
        os.waitpid(part.pid, os.WUNTRACED)
        process._looked -= 100.0
        assert process.halted_part(2.5) is None
        process._looked -= 1.0
        assert process.halted_part(2.5) == f"process {part.pid} (sleep)"
        part.send_signal(signal.SIGCONT)
        process._looked -= 1.0
        assert process.halted_part(2.5) is None
    finally:
        part.kill()
        part.wait()
