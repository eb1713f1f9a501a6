"""Which device holds weights on their way: adapters need no communicator of NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mrl.engine_pool.remote.rendezvous import open_store
from mrl.weight_sync import transports
from mrl.weight_sync.rank_pair import PairSender
from mrl.weight_sync.staging import Staging
from mrl.weight_sync.transports import transfer_device
from tests.disaggregated.test_weights import (
    CPU,
    NO_CANARIES,
    PATIENT_S,
    Receiving,
    assert_same,
    expected,
    held,
    make_buckets,
)


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    store, address = open_store("127.0.0.1")
    yield address
    del store


def test_an_adapter_travels_over_gloo_whatever_the_rank_has(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of GPUs would have an NCCL communicator, for each tenant and worker."""
    gpu = torch.device("cuda", 3)
    monkeypatch.setattr(transports, "local_device", lambda: gpu)
    assert transfer_device(sends_adapter=False) == gpu
    device = transfer_device(sends_adapter=True)
    assert device == CPU
    worker = Receiving(address, "one", (1,), Staging())
    sender = PairSender(address, PATIENT_S, device)
    assert sender.send(make_buckets(1), 1, ["one"], NO_CANARIES) == []
    worker.finish()
    assert sender._groups["one"]._nccl is None
    assert_same(held(worker.staging), expected(1))
