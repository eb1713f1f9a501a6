"""The process of a server, seen from two threads."""

from __future__ import annotations

from types import SimpleNamespace

from mrl.rollout.sglang import process


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
