"""Deltas on their way to workers: the bits arrive, and planted faults are healed by whole buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.engine_pool.remote.rendezvous import open_store
from mrl.kernels.digest import add_digests, digests_of
from mrl.types import WeightBucket
from mrl.weight_sync.delta import Delta, LastVersion, Traffic
from mrl.weight_sync.rank_pair import PairSender
from mrl.weight_sync.staging import Staging
from tests.disaggregated.test_weights import (
    CPU,
    NO_CANARIES,
    PATIENT_S,
    Receiving,
    assert_same,
    held,
)

SHAPES = ((40, 50), (7,), (300, 11), (2000,))
NUM = len(SHAPES)
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    store, address = open_store("127.0.0.1")
    yield address
    del store


def tensors(version: int, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Return the weights of a version; from one version to the next about 2% of the elements change."""
    found = []
    for number, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(shape, generator=generator)
        for _ in range(version):
            changes = torch.rand(shape, generator=generator) < 0.02
            weights += changes * torch.randn(shape, generator=generator)
        found.append((f"model.layers.{number}.w", weights.to(dtype)))
    return found


def buckets(version: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[WeightBucket]:
    """Yield a bucket a tensor from two buffers in turn, as parallel/export.py does."""
    buffers = [torch.empty(16_000, dtype=torch.uint8) for _ in range(2)]
    for i, (name, tensor) in enumerate(tensors(version, dtype)):
        flat = buffers[i % 2][: tensor.nbytes]
        flat.copy_(tensor.view(-1).view(torch.uint8))
        yield WeightBucket(
            [(name, flat.view(dtype).view(tensor.shape))],
            version,
            flat,
            i == NUM - 1,
            digest=add_digests(digests_of([(name, tensor)])),
        )


@pytest.fixture
def sender(address: tuple[str, int]) -> Iterator[PairSender]:
    sender = PairSender(address, PATIENT_S, CPU, 1000)
    yield sender
    sender.close()


def send(
    sender: PairSender, version: int, *names: str, dtype: torch.dtype = torch.bfloat16
) -> Traffic:
    assert sender.send(buckets(version, dtype), version, names, NO_CANARIES) == []
    return sender.traffic


class Alternating(Receiving):
    """Receives version i into staging i modulo the number of stagings, as a worker that runs ahead."""

    def __init__(
        self, address: tuple[str, int], name: str, versions: Sequence[int], stagings: list[Staging]
    ) -> None:
        self.stagings = stagings
        super().__init__(address, name, versions, stagings[0])

    def _run(self, versions: Sequence[int]) -> None:
        try:
            for version in versions:
                self._receiver.receive(self.stagings[version % len(self.stagings)], version)
        except RuntimeError as error:
            self.error = error


@pytest.mark.parametrize("num_stagings", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_versions_arrive_bit_for_bit_and_few_bytes_travel(
    dtype: torch.dtype, num_stagings: int, address: tuple[str, int], sender: PairSender
) -> None:
    stagings = [Staging() for _ in range(num_stagings)]
    worker = Alternating(address, "one", range(6), stagings)
    whole = sum(tensor.nbytes for _, tensor in tensors(0, dtype))
    for version in range(6):
        traffic = send(sender, version, "one", dtype=dtype)
        assert traffic.full_bytes == whole
        assert traffic.num_resent == 0
        if version == 0:
            assert (traffic.num_full, traffic.num_bytes) == (1, whole)
        else:
            assert traffic.num_full == 0
            assert traffic.num_compared == whole // dtype.itemsize
            assert 0.01 < traffic.num_changed / traffic.num_compared < 0.03
            assert traffic.num_bytes < 0.06 * whole
    worker.finish()
    for version in range(6 - num_stagings, 6):
        staging = stagings[version % num_stagings]
        assert staging.version == version
        assert_same(held(staging), dict(tensors(version, dtype)))


def test_every_nth_version_is_whole(address: tuple[str, int]) -> None:
    worker = Receiving(address, "one", range(8), Staging())
    sender = PairSender(address, PATIENT_S, CPU, 2)
    assert [send(sender, version, "one").num_full for version in range(8)] == [1, 0, 0] * 2 + [1, 0]
    worker.finish()


def test_a_late_worker_does_not_put_off_the_whole_version_of_another(
    address: tuple[str, int],
) -> None:
    """The late one gets the version again that was the other one's last delta before a whole one."""
    sender = PairSender(address, PATIENT_S, CPU, 2)
    worker = Receiving(address, "one", range(5), Staging())
    late = Receiving(address, "late", (2, 3, 4), Staging())
    assert [send(sender, version, "one").num_full for version in range(3)] == [1, 0, 0]
    assert send(sender, 2, "late").num_full == 1
    assert send(sender, 3, "one", "late").num_full == 1  # that of "one"
    assert send(sender, 4, "one", "late").num_full == 0
    for each in (worker, late):
        each.finish()
        assert_same(held(each.staging), dict(tensors(4, torch.bfloat16)))


def test_a_worker_without_the_base_gets_the_whole(
    address: tuple[str, int], sender: PairSender
) -> None:
    """One that missed a version (a lost delta), one that is new, and one with both."""
    often = Receiving(address, "often", range(5), Staging())
    seldom = Receiving(address, "seldom", (0, 2, 3), Staging())
    assert send(sender, 0, "often", "seldom").num_full == 2
    assert send(sender, 1, "often").num_full == 0
    assert send(sender, 2, "often", "seldom").num_full == 1
    assert send(sender, 3, "often", "seldom").num_full == 0
    seldom.finish()
    again = Receiving(address, "again", (4,), Staging())  # the worker's successor
    assert send(sender, 4, "often", "again").num_full == 1
    for worker in (often, again):
        worker.finish()
        assert_same(held(worker.staging), dict(tensors(4, torch.bfloat16)))
    assert_same(held(seldom.staging), dict(tensors(3, torch.bfloat16)))


def test_a_trainer_that_sent_nothing_to_a_version_keeps_the_one_before(
    address: tuple[str, int], sender: PairSender
) -> None:
    worker = Receiving(address, "one", (0, 2), Staging())
    send(sender, 0, "one")
    assert send(sender, 1) == Traffic()
    assert send(sender, 2, "one").num_full == 0  # version 0 is the base
    worker.finish()
    assert_same(held(worker.staging), dict(tensors(2, torch.bfloat16)))


Tamper = Callable[[list[Delta], Delta], Delta]
"""Turns the newest delta of a run into another one, given all deltas before it."""
FAULTS: dict[str, tuple[Tamper, str]] = {
    "doubled": (lambda before, _: before[-NUM], "expected bucket 1 of version 2"),
    "of the next bucket": (
        lambda _, delta: dataclasses.replace(delta, bucket=delta.bucket + 1), "got one for bucket 2"),
    "of an older version": (
        lambda _, delta: dataclasses.replace(delta, base=delta.base - 1), "of version 1, expected"),
    "of other values": (
        lambda before, delta: dataclasses.replace(delta, payload=before[-NUM].payload),
        "has another digest than in the trainer"),
    "of another size": (
        lambda _, delta: dataclasses.replace(delta, element_size=4), "expected"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_delta_is_healed_by_its_whole_bucket(
    fault: str,
    address: tuple[str, int],
    sender: PairSender,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first bucket of version 3 comes with another delta."""
    tamper, said = FAULTS[fault]
    seen: list[Delta] = []
    replace = LastVersion.replace

    def tampered(self: LastVersion, *arguments: Any, **options: Any) -> Delta | None:
        delta = replace(self, *arguments, **options)
        if delta is None:
            return None
        seen.append(delta)
        is_due = delta.base == 2 and delta.bucket == 1
        return tamper(seen[:-1], delta) if is_due else delta

    monkeypatch.setattr(LastVersion, "replace", tampered)
    worker = Receiving(address, "one", range(5), Staging())
    resent = [send(sender, version, "one").num_resent for version in range(5)]
    worker.finish()
    assert resent == [0, 0, 0, 1, 0]
    assert_same(held(worker.staging), dict(tensors(4, torch.bfloat16)))
    printed = " ".join("".join(capsys.readouterr()).split())
    assert said in printed
    assert "the bucket is sent whole" in printed


def test_two_deltas_in_the_wrong_order_are_healed(
    address: tuple[str, int], sender: PairSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = LastVersion.replace
    former: list[Delta] = []

    def reordered(self: LastVersion, *arguments: Any, **options: Any) -> Delta | None:
        """Each bucket comes with the delta of the one before it."""
        delta = replace(self, *arguments, **options)
        if delta is None or delta.base != 1:
            return delta
        former.append(delta)
        return former[-2] if len(former) > 1 else delta

    monkeypatch.setattr(LastVersion, "replace", reordered)
    worker = Receiving(address, "one", range(4), Staging())
    assert [send(sender, version, "one").num_resent for version in range(4)] == [0, 0, NUM - 1, 0]
    worker.finish()
    assert_same(held(worker.staging), dict(tensors(3, torch.bfloat16)))


class Damaged(Staging):
    """Its memory is not what it received."""

    damage: Callable[[Staging], None] = staticmethod(lambda staging: None)

    def begin(self, version: int, canaries: Any, base: Staging | None = None) -> None:
        if version == 2:
            self.damage(self)
        super().begin(version, canaries, base)


def flip_a_bit(staging: Staging) -> None:
    flat = next(staging.buckets()).flat
    assert flat is not None
    flat[99] ^= 8


def swap_versions(staging: Staging) -> None:
    """All bytes are of the version before, under the number of this one: its delta was lost."""
    for bucket, (_, tensor) in zip(staging.buckets(), tensors(0, torch.bfloat16), strict=True):
        assert bucket.flat is not None
        bucket.flat.copy_(tensor.view(-1).view(torch.uint8))


def drop_layout(staging: Staging) -> None:
    staging._headers = [{**header, "tensors": []} for header in staging._headers]


@pytest.mark.parametrize(
    ("damage", "num_resent"), [(flip_a_bit, 1), (swap_versions, NUM - 1), (drop_layout, NUM)]
)
def test_a_worker_whose_memory_is_wrong_is_healed(
    damage: Callable[[Staging], None],
    num_resent: int,
    address: tuple[str, int],
    sender: PairSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bucket of 7 elements has a delta of no change, and the right bytes."""
    monkeypatch.setattr(Damaged, "damage", staticmethod(damage))
    worker = Receiving(address, "one", range(4), Damaged())
    found = [send(sender, version, "one").num_resent for version in range(4)]
    worker.finish()
    assert found == [0, 0, num_resent, 0]
    assert_same(held(worker.staging), dict(tensors(3, torch.bfloat16)))


def one_bucket(version: int, weights: Tensor, **more: Any) -> WeightBucket:
    digest = add_digests(digests_of([("w", weights)]))
    return WeightBucket([("w", weights)], version, is_last=True, **{"digest": digest, **more})


def test_what_has_no_delta_is_sent_whole(address: tuple[str, int], sender: PairSender) -> None:
    """A bucket of another layout, without a digest, or with other values throughout."""
    weights = torch.randn(100)
    versions = [
        one_bucket(0, weights), one_bucket(1, weights), one_bucket(2, weights.view(10, 10)),
        one_bucket(3, weights.view(10, 10)), one_bucket(4, weights.view(10, 10), digest=None),
        one_bucket(5, weights.view(10, 10) + 1.0), one_bucket(6, weights.view(10, 10) + 1.0),
    ]  # fmt: skip
    worker = Receiving(address, "one", range(7), Staging())
    sent = []
    for version, bucket in enumerate(versions):
        assert sender.send([bucket], version, ["one"], NO_CANARIES) == []
        sent.append(sender.traffic.num_bytes)
    worker.finish()
    assert sent == [400, 8, 400, 8, 400, 400, 8]  # 8 bytes say that nothing changed
    (bucket,) = worker.staging.buckets()
    assert torch.equal(bucket.tensors[0][1], weights.view(10, 10) + 1.0)


def test_metrics_of_a_step() -> None:
    traffic = Traffic(30, 400, 1, 2, 5, 100)
    traffic.add(Traffic(10, 400, 0, 0, 3, 100))
    assert traffic.metrics() == {
        "rollout/sync_sent_bytes": 40.0,
        "rollout/sync_sent_share": 0.05,
        "rollout/sync_full_workers": 1.0,
        "rollout/sync_resent_buckets": 2.0,
        "rollout/sync_changed_share": 0.04,
    }
    assert "rollout/sync_changed_share" not in Traffic(400, 400, 1).metrics()
