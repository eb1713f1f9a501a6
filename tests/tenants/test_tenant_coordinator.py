"""The coordinator of a disaggregated service: workers hear of all tenants, strangers of none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.wire import Wire, WireClosed
from mrl.errors import EngineGone, InputError, RunFailed
from mrl.service.tenant_coordinator import TenantCoordinator
from tests.waiting import wait_until


@pytest.fixture
def tenants() -> Iterator[TenantCoordinator]:
    made = TenantCoordinator(Membership(2), [socket.gethostname()])
    yield made
    made.close()


def join(tenants: TenantCoordinator, engine: int, token: str | None = None) -> Wire:
    wire = Wire(socket.create_connection(tenants.address))
    wire.send({"type": "hello", "engine": engine, "token": token or tenants.token})
    return wire


def test_a_worker_that_joins_late_hears_of_the_tenants_that_are_there(
    tenants: TenantCoordinator,
) -> None:
    tenants.open("ann", {"token": "a"})
    tenants.open("bob", {"token": "b"})
    tenants.end("ann")
    wire = join(tenants, 0)
    assert wire.receive()[0] == {"type": "open", "tenant": "bob", "token": "b"}
    tenants.open("cec", {"token": "c"})
    tenants.end("bob")
    assert [wire.receive()[0]["tenant"] for _ in range(2)] == ["cec", "bob"]
    wire.close()


def test_another_worker_takes_the_place_of_the_first(tenants: TenantCoordinator) -> None:
    tenants.open("ann", {})
    first = join(tenants, 1)
    first.receive()
    second = join(tenants, 1)
    assert second.receive()[0]["tenant"] == "ann"
    with pytest.raises(WireClosed):
        first.receive()
    second.close()


@pytest.mark.parametrize(("engine", "token"), [(0, "wrong"), (2, None), (-1, None)])
def test_strangers_hear_of_nobody(
    tenants: TenantCoordinator, engine: int, token: str | None
) -> None:
    tenants.open("ann", {"secret": "of ann"})
    wire = join(tenants, engine, token)
    with pytest.raises(WireClosed):
        wire.receive()


def test_the_start_waits_for_every_engine_and_tells_which_one_is_missing(
    tenants: TenantCoordinator,
) -> None:
    wires = [join(tenants, 0)]
    wires[0].send({"type": "started"})
    with pytest.raises(RunFailed, match=r"engines \[1\] .* did not start within 0.5 s"):
        tenants.wait_until_started(0.5)
    wires.append(join(tenants, 1))
    wires[1].send({"type": "started"})
    tenants.wait_until_started(10)
    for wire in wires:
        wire.close()


def test_what_a_worker_could_not_do_is_raised_with_its_kind(tenants: TenantCoordinator) -> None:
    wire = join(tenants, 0)
    wire.send({"type": "failed", "error": "EngineGone", "text": "no memory"})
    with pytest.raises(EngineGone, match="rollout engine 0: no memory"):
        tenants.wait_until_started(10)
    wire.close()


@pytest.mark.parametrize(
    "message",
    [{}, {"type": "times", "sums": 3}, {"type": "failed", "error": [], "text": 1, "sums": {}}],
)
def test_a_worker_that_says_what_is_no_message_is_let_go(
    tenants: TenantCoordinator, message: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wire = join(tenants, 0)
    wire.send(message)
    if "error" in message:  # an error that nobody knows by that name
        with pytest.raises(RunFailed, match="rollout engine 0: 1"):
            tenants.wait_until_started(10)
    else:
        with pytest.raises(WireClosed):
            wire.receive()
        printed: list[str] = []  # the warning follows the end of the connection

        def is_said() -> bool:
            printed.append(capsys.readouterr().out)
            return "its worker is lost: its message could not be read" in "".join(printed).replace(
                "\n", " "
            )

        wait_until(is_said, "the loss is reported")
    wire.close()


def test_a_tenant_whose_recipe_is_too_large_for_workers_keeps_none_of_them(
    tenants: TenantCoordinator,
) -> None:
    with pytest.raises(InputError, match="expected at most 1048576"):
        tenants.open("eve", {"recipe": "\u00e9" * 300_000})
    tenants.open("ann", {})
    wire = join(tenants, 0)
    assert wire.receive()[0]["tenant"] == "ann"
    wire.close()


def test_the_times_of_all_gates_are_added_up_and_taken_once(tenants: TenantCoordinator) -> None:
    wires = [join(tenants, engine) for engine in (0, 1)]
    for wire in wires:
        wire.send({"type": "times", "sums": {"sent_s": 1.5, "ann/tokens": 2.0}})
        wire.send({"type": "started"})
    tenants.wait_until_started(10)
    assert tenants.take_times() == {"sent_s": 3.0, "ann/tokens": 4.0}
    assert tenants.take_times() == {}
    for wire in wires:
        wire.close()
