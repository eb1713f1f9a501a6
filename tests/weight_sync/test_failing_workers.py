"""Workers that are slow or die while deltas arrive.

Each transfer of a bucket has a time limit of its own: the delta, the answer to it, the whole bucket.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.engine_pool.remote.rendezvous import open_store
from mrl.weight_sync.rank_pair import PairReceiver, PairSender
from mrl.weight_sync.staging import Staging
from tests.disaggregated.test_weights import (
    CPU,
    NO_CANARIES,
    PATIENT_S,
    Receiving,
    assert_same,
    forked,
    held,
)
from tests.weight_sync.test_deltas import buckets, tensors

__all__ = ["forked"]

LIMIT_S, GRACE_S = 2.0, 0.2
SLOW_S = 1.2
"""Less than the limit, but two of them are more than it."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr("mrl.weight_sync.rank_pair.GRACE_S", GRACE_S)
    monkeypatch.setattr("mrl.weight_sync.rank_pair.BEAT_S", 0.05)
    store, address = open_store("127.0.0.1")
    yield address
    del store


class Slow(Staging):
    """Takes `refuse_s` to refuse the first delta of version 1, and `room_s` until it takes the whole
    bucket."""

    def __init__(self, refuse_s: float, room_s: float) -> None:
        super().__init__()
        self._refuse_s, self._room_s = refuse_s, room_s
        self.transfers: list[str] = []

    def patch(self, header: Mapping[str, Any], payload: Tensor) -> str:
        if self._arriving != 1 or self._headers:
            return super().patch(header, payload)
        self.transfers.append("refused")
        time.sleep(self._refuse_s)
        return "the test refuses it"

    def room(self, header: Mapping[str, Any]) -> Tensor:
        if self._arriving == 1:
            self.transfers.append("whole")
            time.sleep(self._room_s)
        return super().room(header)


def test_a_refused_delta_and_its_whole_bucket_do_not_share_a_limit(
    address: tuple[str, int],
) -> None:
    """Each transfer takes less than the limit, and all of them together more."""
    staging = Slow(SLOW_S, SLOW_S)
    worker = Receiving(address, "one", range(3), staging)
    sender = PairSender(address, LIMIT_S, CPU, 1000)
    resent = []
    for version in range(3):
        start = time.monotonic()
        assert sender.send(buckets(version), version, ["one"], NO_CANARIES) == []
        resent.append(sender.traffic.num_resent)
        if version == 1:
            assert time.monotonic() - start > LIMIT_S + GRACE_S
    worker.finish()
    assert staging.transfers == ["refused", "whole"]
    assert resent == [0, 1, 0]
    assert_same(held(staging), dict(tensors(2, torch.bfloat16)))


@pytest.mark.parametrize(
    ("refuse_s", "room_s"), [(3 * LIMIT_S, 0.0), (0.0, 3 * LIMIT_S)], ids=["answer", "whole bucket"]
)
def test_a_worker_that_exceeds_the_limit_of_one_transfer_has_failed(
    refuse_s: float,
    room_s: float,
    address: tuple[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It delays the trainer by one limit, and the other worker has the version."""
    healthy = Receiving(address, "healthy", range(2), Staging())
    Receiving(address, "slow", range(2), Slow(refuse_s, room_s))
    sender = PairSender(address, LIMIT_S, CPU, 1000)
    names = ["healthy", "slow"]
    assert sender.send(buckets(0), 0, names, NO_CANARIES) == []
    start = time.monotonic()
    assert sender.send(buckets(1), 1, names, NO_CANARIES) == ["slow"]
    assert LIMIT_S / 2 < time.monotonic() - start < 2 * (LIMIT_S + GRACE_S)
    assert "weights could not be sent to slow" in " ".join("".join(capsys.readouterr()).split())
    healthy.finish()
    assert_same(held(healthy.staging), dict(tensors(1, torch.bfloat16)))


class Deadly(Staging):
    """Kills its process in the middle of version 1, when the second delta has arrived."""

    def patch(self, header: Mapping[str, Any], payload: Tensor) -> str:
        if self._arriving == 1 and len(self._headers) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().patch(header, payload)


def receive_and_die(pipe: Connection) -> None:
    receiver, staging = PairReceiver(pipe.recv(), "dies", PATIENT_S, CPU), Deadly()
    for version in range(2):
        receiver.receive(staging, version)


def test_a_worker_killed_in_a_delta_costs_the_others_nothing(forked: Any) -> None:
    """Its successor gets the whole of the next version, and the other worker a delta."""
    pipe = forked(receive_and_die)
    store, address = open_store("127.0.0.1")
    pipe.send(address)
    lives = Receiving(address, "lives", range(3), Staging())
    sender = PairSender(address, PATIENT_S, CPU, 1000)
    assert sender.send(buckets(0), 0, ["dies", "lives"], NO_CANARIES) == []
    start = time.monotonic()
    assert sender.send(buckets(1), 1, ["dies", "lives"], NO_CANARIES) == ["dies"]
    assert time.monotonic() - start < PATIENT_S / 2  # found out at once, by the connection
    sender.keep(["lives"])
    again = Receiving(address, "again", (2,), Staging())
    assert sender.send(buckets(2), 2, ["lives", "again"], NO_CANARIES) == []
    assert sender.traffic.num_full == 1
    for worker in (lives, again):
        worker.finish()
        assert_same(held(worker.staging), dict(tensors(2, torch.bfloat16)))
    del store
