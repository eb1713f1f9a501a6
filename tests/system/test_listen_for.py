"""The address at which a machine listens for others."""

from __future__ import annotations

import socket

import pytest

from mrl.system import rendezvous


def test_a_host_that_knows_itself_as_loopback_listens_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with rendezvous.listen_for([]) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    asked: list[str] = []

    def towards(host: str) -> str:
        asked.append(host)
        return ""

    monkeypatch.setattr(rendezvous, "address_towards", towards)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with rendezvous.listen_for(["node2"]) as server:  # the last resort
        assert server.getsockname()[0] == "127.0.0.1"
    assert asked == ["node2"]


def test_theaddress_towards_a_host() -> None:
    assert rendezvous.address_towards("127.0.0.1") == "127.0.0.1"
