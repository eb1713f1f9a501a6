"""One request cannot kill engine after engine: the gate's part of that, without an engine."""

from __future__ import annotations

import pytest
from test_gate import Fewest, names, requests_of

from mrl.engines.base import EndsEngine
from mrl.engines.gate import Gate


def three_tenants() -> Gate:
    gate = Gate(Fewest(), capacity_tokens=1000)
    for name in ("ada", "bob", "eve"):
        gate.enter(name)
    gate.resize(1000, 64)
    return gate


def test_requests_in_flight_when_an_engine_died_are_alone_in_the_next_one():
    gate = three_tenants()
    lines = {n: gate.enqueue(n, requests_of(n[0], 2), lambda: None) for n in ("ada", "eve")}
    late = gate.enqueue("bob", requests_of("b", 1), lambda: None)
    assert [names(line.take()) for line in (*lines.values(), late)] == [
        ["a0", "a1"],
        ["e0", "e1"],
        ["b0"],
    ]
    late.finish(requests_of("b", 1)[0], 6)
    late.close()
    for line in lines.values():  # the engine dies; no line was alone in it
        assert not line.lose()
        line.close()
    waits = gate.enqueue("bob", requests_of("b", 2), lambda: None)
    assert waits.take() == []  # there is no engine
    gate.resize(1000, 64)
    assert names(waits.take()) == [
        "b0",
        "b1",
    ]  # none of its requests was in flight when an engine died
    ada = gate.enqueue("ada", requests_of("a", 2), lambda: None)
    eve = gate.enqueue("eve", requests_of("e", 2), lambda: None)
    more = gate.enqueue("bob", requests_of("c", 1), lambda: None)
    assert ada.take() == eve.take() == more.take() == []
    for request in requests_of("b", 2):
        waits.finish(request, 6)
    waits.close()
    assert names(ada.take()) == ["a0", "a1"]
    assert eve.take() == more.take() == []
    for request in requests_of("a", 2):
        ada.finish(request, 6)  # the engine survived them
    assert names(eve.take()) == ["e0", "e1"]
    assert more.take() == []
    assert eve.lose()  # alone
    eve.close()
    ada.close()
    assert not more.lose()  # it waited
    more.close()
    gate.resize(1000, 64)
    with pytest.raises(EndsEngine, match="e0: the engine ended"):
        gate.enqueue("eve", requests_of("e", 2), lambda: None)
    for name in ("ada", "bob", "eve"):  # no request has to run alone any more
        line = gate.enqueue(name, requests_of(name[0], 2), lambda: None)
        assert len(line.take()) == 2


def test_a_loss_that_is_reported_late_does_not_close_the_gate():
    gate = three_tenants()
    ada = gate.enqueue("ada", requests_of("a", 1), lambda: None)
    gate.resize(1000, 64)  # another thread found the loss first, and an engine runs again
    assert not ada.lose()
    ada.close()
    bob = gate.enqueue("bob", requests_of("b", 1), lambda: None)
    assert names(bob.take()) == ["b0"]


def test_a_tenant_that_leaves_while_it_has_the_engine_alone_frees_it():
    gate = three_tenants()
    eve = gate.enqueue("eve", requests_of("e", 1), lambda: None)
    eve.lose()
    eve.close()
    gate.resize(1000, 64)
    gate.enqueue("eve", requests_of("e", 1), lambda: None)
    bob = gate.enqueue("bob", requests_of("b", 1), lambda: None)
    assert bob.take() == []
    gate.leave("eve")
    assert names(bob.take()) == ["b0"]
