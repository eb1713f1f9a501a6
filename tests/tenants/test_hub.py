"""The hub of a disaggregated service: workers hear of all tenants, strangers of none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.disaggregated.wire import Wire, WireClosed
from mrl.errors import EngineGone, InputError, RunFailed
from mrl.tenants.hub import Hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(2, [socket.gethostname()])
    yield made
    made.close()


def join(hub: Hub, engine: int, token: str | None = None) -> Wire:
    wire = Wire(socket.create_connection(hub.address))
    wire.send({"type": "hello", "engine": engine, "token": token or hub.token})
    return wire


def test_a_worker_that_joins_late_hears_of_the_tenants_that_are_there(hub: Hub) -> None:
    hub.open("ann", {"token": "a"})
    hub.open("bob", {"token": "b"})
    hub.end("ann")
    wire = join(hub, 0)
    assert wire.receive()[0] == {"type": "open", "tenant": "bob", "token": "b"}
    hub.open("cec", {"token": "c"})
    hub.end("bob")
    assert [wire.receive()[0]["tenant"] for _ in range(2)] == ["cec", "bob"]
    wire.close()


def test_another_worker_takes_the_place_of_the_first(hub: Hub) -> None:
    hub.open("ann", {})
    first = join(hub, 1)
    first.receive()
    second = join(hub, 1)
    assert second.receive()[0]["tenant"] == "ann"
    with pytest.raises(WireClosed):
        first.receive()
    second.close()


@pytest.mark.parametrize(("engine", "token"), [(0, "wrong"), (2, None), (-1, None)])
def test_strangers_hear_of_nobody(hub: Hub, engine: int, token: str | None) -> None:
    hub.open("ann", {"secret": "of ann"})
    wire = join(hub, engine, token)
    with pytest.raises(WireClosed):
        wire.receive()


def test_the_start_waits_for_every_engine_and_tells_which_one_is_missing(hub: Hub) -> None:
    wires = [join(hub, 0)]
    wires[0].send({"type": "started"})
    with pytest.raises(RunFailed, match=r"engines \[1\] .* did not start within 0.5 s"):
        hub.wait_until_started(0.5)
    wires.append(join(hub, 1))
    wires[1].send({"type": "started"})
    hub.wait_until_started(10)
    for wire in wires:
        wire.close()


def test_what_a_worker_could_not_do_is_raised_with_its_kind(hub: Hub) -> None:
    wire = join(hub, 0)
    wire.send({"type": "failed", "error": "EngineGone", "text": "no memory"})
    with pytest.raises(EngineGone, match="rollout engine 0: no memory"):
        hub.wait_until_started(10)
    wire.close()


@pytest.mark.parametrize(
    "message",
    [{}, {"type": "times", "sums": 3}, {"type": "failed", "error": [], "text": 1, "sums": {}}],
)
def test_a_worker_that_says_what_is_no_message_is_let_go(
    hub: Hub, message: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wire = join(hub, 0)
    wire.send(message)
    if "error" in message:  # an error that nobody knows by that name
        with pytest.raises(RunFailed, match="rollout engine 0: 1"):
            hub.wait_until_started(10)
    else:
        with pytest.raises(WireClosed):
            wire.receive()
        assert "rollout engine 0: its worker is let go" in capsys.readouterr().out
    wire.close()


def test_a_tenant_whose_recipe_is_too_large_for_workers_keeps_none_of_them(hub: Hub) -> None:
    with pytest.raises(InputError, match="expected at most 1048576"):
        hub.open("eve", {"recipe": "\u00e9" * 300_000})
    hub.open("ann", {})
    wire = join(hub, 0)
    assert wire.receive()[0]["tenant"] == "ann"
    wire.close()


def test_the_times_of_all_gates_are_added_up_and_taken_once(hub: Hub) -> None:
    wires = [join(hub, engine) for engine in (0, 1)]
    for wire in wires:
        wire.send({"type": "times", "sums": {"sent_s": 1.5, "ann/tokens": 2.0}})
        wire.send({"type": "started"})
    hub.wait_until_started(10)
    assert hub.take_times() == {"sent_s": 3.0, "ann/tokens": 4.0}
    assert hub.take_times() == {}
    for wire in wires:
        wire.close()
