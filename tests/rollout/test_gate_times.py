"""The sums over time of a gate, on a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mrl.engines.base import Request, SamplingParams
from mrl.engines.gate import Gate
from mrl.engines.gate_times import GateTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Two:
    """Admits requests while no more than two are in the engine."""

    def tokens_each(self, tenant, max_tokens):
        return max_tokens

    def admit(self, free_tokens, capacity_tokens, demands):
        room = free_tokens // 10
        granted = {}
        for demand in demands:
            granted[demand.tenant] = min(room, demand.num_waiting)
            room -= granted[demand.tenant]
        return granted

    def finished(self, tenant, num_tokens):
        pass

    def leave(self, tenant):
        pass


def requests_of(prefix: str, num: int) -> list[Request]:
    """Each has a prompt of 4 tokens and can come to 10."""
    return [Request(f"{prefix}{n}", torch.arange(4), n, SamplingParams(6, 6)) for n in range(num)]


def make(policy=None, *, capacity: int, max_running: int):
    clock = Clock()
    gate = Gate(policy, times=GateTimes(clock))
    gate.resize(capacity, max_running)
    for name in ("ada", "bob"):
        gate.enter(name)
    return SimpleNamespace(gate=gate, clock=clock)


def nothing() -> None:
    pass


def test_the_sums_are_exact():
    """ada's a0 runs from 0 to 3 and a1 from 0 to 2, bob's b0 waits for 2 s and runs from 2 to 6; then
    nothing happens for 4 s."""
    at = make(Two(), capacity=20, max_running=8)
    ada_asks, bob_asks = requests_of("a", 2), requests_of("b", 1)
    ada = at.gate.enqueue("ada", ada_asks, nothing)
    bob = at.gate.enqueue("bob", bob_asks, nothing)
    at.clock.now += 2
    ada.finish(ada_asks[1], 6)
    at.clock.now += 1
    ada.finish(ada_asks[0], 2, is_whole=False)
    ada.finish(ada_asks[0], 2)  # said twice, as after a broken connection
    at.clock.now += 3
    bob.finish(bob_asks[0], 4)
    at.clock.now += 4
    assert at.gate.take_times() == {
        "seconds": 10.0,
        "room_s": 80.0,
        "sent_s": 9.0,
        "running_s": 9.0,
        "cache_s": 200.0,
        "counted_s": 90.0,
        "held_s": (4 + 3) * 2 + (4 + 1) * 3 + (4 + 2) * 4,
        "busy_s": 6.0,
        "mix_s": 2 * 1 + 1 * 2 + 1 * 3,
        "ada/sent_s": 5.0,
        "bob/sent_s": 4.0,
        "ada/waited_s": 0.0,
        "bob/waited_s": 2.0,
        "ada/requests": 2,
        "bob/requests": 1,
        "ada/tokens": 8,
        "bob/tokens": 4,
    }


def test_what_is_taken_is_not_counted_again():
    at = make(capacity=100, max_running=2)
    asks = requests_of("a", 3)
    ada = at.gate.enqueue("ada", asks, nothing)
    at.clock.now += 5
    first = at.gate.take_times()
    assert (first["seconds"], first["ada/sent_s"], first["counted_s"]) == (5.0, 15.0, 150.0)
    assert (first["sent_s"], first["running_s"]) == (15.0, 10.0)  # the third waits in the engine
    at.clock.now += 1
    for request in asks:
        ada.finish(request, 6)
    second = at.gate.take_times()
    assert (second["seconds"], second["ada/sent_s"], second["ada/tokens"]) == (1.0, 3.0, 18)
    assert second["held_s"] == 3 * 7 * 6.0  # when a request ends, for all of its time
    at.clock.now += 1
    assert at.gate.take_times()["ada/sent_s"] == 0.0


def test_requests_that_are_not_sent_and_tenants_that_leave_are_gone():
    at = make(Two(), capacity=10, max_running=8)
    asks = requests_of("a", 3)
    ada = at.gate.enqueue("ada", asks, nothing)
    bob = at.gate.enqueue("bob", requests_of("b", 2), nothing)
    at.clock.now += 1
    ada.withdraw({"a1"})
    at.clock.now += 1
    at.gate.leave("bob")
    ada.close()
    bob.close()
    at.clock.now += 1
    sums = at.gate.take_times()
    assert (sums["ada/waited_s"], sums["ada/requests"], sums["bob/waited_s"]) == (3.0, 3, 4.0)
    assert sums["counted_s"] == 20.0
    assert sums["running_s"] == 2.0
    at.clock.now += 1
    assert {k: v for k, v in at.gate.take_times().items() if v} == {
        "seconds": 1.0,
        "room_s": 8.0,
        "cache_s": 10.0,
    }


def test_the_sums_hold_nothing_of_past_tenants():
    at = make(capacity=100, max_running=2)
    for number in range(50):
        name = f"t{number}"
        at.gate.enter(name)
        asks = requests_of(name, 1)
        at.gate.enqueue(name, asks, nothing).finish(asks[0], 6)
        at.gate.leave(name)
        taken = at.gate.take_times()
        assert {key.split("/")[0] for key in taken if "/" in key} == {name}
