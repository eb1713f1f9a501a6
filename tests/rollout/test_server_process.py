"""The process of a server, seen from two threads."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mrl.engines.sglang import process


def test_a_server_that_is_stopped_by_another_thread_meanwhile_is_killed_once(monkeypatch):
    """Each look at the process forgets it, as stop() in another thread may between two looks."""
    killed = []
    monkeypatch.setattr(process, "kill_session", killed.append)
    monkeypatch.setattr(process, "session_processes", lambda session: [session])

    class Stopping(process.ServerProcess):
        @property
        def _popen(self):
            popen, self.popen = self.popen, None
            return popen

    server = Stopping.__new__(Stopping)
    for look in (server.kill, server.exit_code, server.tree, lambda: server.pid):
        server.popen = SimpleNamespace(pid=7, poll=lambda: None)
        look()
        assert server.popen is None
        look()
    assert killed == [7]


def test_ports_leave_room_for_the_one_that_sglang_adds(monkeypatch) -> None:
    assert process.HIGHEST_PORT == 55_535
    monkeypatch.setattr(process, "HIGHEST_PORT", 42_000)  # a third of Linux's usual ports
    assert max(process._free_port() for _ in range(30)) <= 42_000
    monkeypatch.setattr(process, "HIGHEST_PORT", 1)
    with pytest.raises(OSError, match="64 free ports were all above 1"):
        process._free_port()


def test_the_child_imports_nothing_heavy_before_sglang() -> None:
    """Torch takes 3 seconds of a core. SGLang imports it; the stand-ins of other tests do not."""
    code = "import sys, mrl.engines.sglang.child; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"False\n"
