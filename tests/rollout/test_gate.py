"""The gate before an engine of several tenants, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.engines.admission import Demand
from mrl.engines.base import Request, SamplingParams
from mrl.engines.gate import Gate
from mrl.engines.sglang.request_sender import RequestSender
from mrl.errors import RunFailed


class Fewest:
    """Admits one request after the other to whoever has fewest tokens in sender, while they fit."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.lengths: list[tuple[str, int]] = []
        self.left: list[str] = []

    def tokens_each(self, tenant: str, max_tokens: int) -> int:
        return max_tokens

    def admit(
        self, free_tokens: int, capacity_tokens: int, demands: Sequence[Demand]
    ) -> Mapping[str, int]:
        self.asked.append((free_tokens, capacity_tokens))
        granted = {demand.tenant: 0 for demand in demands}
        while True:
            fits = [
                demand
                for demand in demands
                if granted[demand.tenant] < demand.num_waiting and demand.tokens_each <= free_tokens
            ]
            if not fits:
                return granted
            next_one = min(
                fits, key=lambda d: d.tokens_in_flight + granted[d.tenant] * d.tokens_each
            )
            granted[next_one.tenant] += 1
            free_tokens -= next_one.tokens_each

    def finished(self, tenant: str, num_tokens: int) -> None:
        self.lengths.append((tenant, num_tokens))

    def leave(self, tenant: str) -> None:
        self.left.append(tenant)


def requests_of(prefix: str, num: int) -> list[Request]:
    """Each can come to 10 tokens."""
    return [Request(f"{prefix}{n}", torch.arange(4), n, SamplingParams(6, 6)) for n in range(num)]


def names(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_without_a_policy_everything_is_sent_at_once():
    gate = Gate()
    gate.enter("ada")
    line = gate.enqueue("ada", requests_of("a", 5), lambda: None)
    assert names(line.take()) == ["a0", "a1", "a2", "a3", "a4"]
    assert line.is_empty
    with pytest.raises(RuntimeError, match="'bob' is not at the gate"):
        gate.enqueue("bob", requests_of("b", 1), lambda: None)


def test_a_late_tenant_gets_what_is_freed():
    policy, told = Fewest(), []
    gate = Gate(policy, capacity_tokens=40)
    for name in ("ada", "bob"):
        gate.enter(name)
    first = requests_of("a", 10)
    ada = gate.enqueue("ada", first, lambda: told.append("ada"))
    assert names(ada.take()) == ["a0", "a1", "a2", "a3"]
    bob = gate.enqueue("bob", requests_of("b", 3), lambda: told.append("bob"))
    assert bob.take() == []
    ada.finish(first[0], 2)
    ada.finish(first[0], 2)  # said twice, as after a broken connection
    assert names(bob.take()) == ["b0"]
    assert ada.take() == []
    ada.finish(first[1], 1, is_whole=False)
    assert names(bob.take()) == ["b1"]
    assert policy.lengths == [("ada", 6)]  # of those that finished alone
    assert told == ["ada", "bob", "bob"]
    assert policy.asked[-1] == (10, 40)
    ada.close()  # gives back what was in sender, and what had not been sent
    assert names(bob.take()) == ["b2"]
    assert ada.is_empty
    gate.leave("bob")
    assert policy.left == ["bob"]
    bob.close()


def test_requests_that_are_taken_back_are_not_sent():
    gate = Gate(Fewest(), capacity_tokens=20)
    gate.enter("ada")
    line = gate.enqueue("ada", requests_of("a", 6), lambda: None)
    assert names(line.withdraw({"a1", "a4"})) == ["a4", "a1"]  # one waits, one was admitted
    assert names(line.take()) == ["a0", "a2"]
    assert names(line.withdraw()) == ["a3", "a5"]
    assert line.is_empty


def test_no_policy_can_stall_an_idle_engine():
    gate = Gate(Fewest(), capacity_tokens=5)  # none of the requests fits
    gate.enter("ada")
    first = requests_of("a", 2)
    line = gate.enqueue("ada", first, lambda: None)
    assert names(line.take()) == ["a0"]
    line.finish(first[0], 6)
    assert names(line.take()) == ["a1"]


class Server:
    """Answers each batch when it is told to."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self.number = 0
        self.answering = threading.Semaphore(0)
        self.process = SimpleNamespace(log_path="a log")

    def new_request_id(self) -> str:
        self.number += 1
        return f"rid{self.number:03d}"

    def stream(self, body: dict[str, Any]):
        self.sent.append([params["sampling_seed"] for params in body["sampling_params"]])
        return Stream(self, len(body["rid"]))

    def check_alive(self, wait_s: float = 0) -> None:
        pass

    def too_late(self, what: str) -> RuntimeError:
        return RunFailed(what)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        pass


class Stream:
    def __init__(self, server: Server, num: int) -> None:
        self.server, self.num = server, num

    def __iter__(self):
        for index in range(self.num):
            self.server.answering.acquire()
            meta = {"finish_reason": {"type": "length"}}
            yield {"index": index, "output_ids": [1, 2], "meta_info": meta}

    def close(self) -> None:
        self.server.answering.release(self.num)


def make_sender(gate: Gate, server: Server, num: int, request_timeout_s: float) -> RequestSender:
    """A call of tenant ada."""
    return RequestSender(
        server,  # pyright: ignore[reportArgumentType]
        requests_of("a", num),
        return_routes=False,
        request_timeout_s=request_timeout_s,
        stall_timeout_s=20,
        is_alone=False,
        enqueue=lambda requests, told: gate.enqueue("ada", requests, told),
    )


def test_the_time_limit_of_a_request_begins_when_it_is_sent():
    gate, server = Gate(Fewest(), capacity_tokens=10), Server()
    for name in ("ada", "bob"):
        gate.enter(name)
    (other,) = requests_of("b", 1)
    bob = gate.enqueue("bob", [other], lambda: None)  # the engine is full
    answers = make_sender(gate, server, 2, request_timeout_s=0.2).answers()
    threading.Timer(0.5, bob.finish, (other, 6)).start()
    server.answering.release()
    assert next(answers).request.request_id == "a0"  # after more than the limit
    with pytest.raises(RunFailed, match="for 1 of 2 samples"):
        next(answers)


def test_a_call_sends_what_is_admitted_and_aborts_what_waits():
    gate, server = Gate(Fewest(), capacity_tokens=20), Server()
    gate.enter("ada")
    sender = make_sender(gate, server, 5, request_timeout_s=20)
    answers = sender.answers()
    server.answering.release()
    assert next(answers).request.request_id == "a0"
    server.answering.release()
    assert next(answers).request.request_id == "a1"
    sender.abort(["a4"])
    server.answering.release(10)
    ended = {a.request.request_id: a.answer["meta_info"]["finish_reason"]["type"] for a in answers}
    assert ended == {"a2": "length", "a3": "length", "a4": "abort"}
    assert server.sent[0] == [0, 1]
    assert sorted(seed for batch in server.sent for seed in batch) == [0, 1, 2, 3]
