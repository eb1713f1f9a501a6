"""Weights on their way to workers: bits, versions, and workers that die, hang or never come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.engine_pool.remote.rendezvous import open_store
from mrl.kernels.digest import add_digests, digests_of
from mrl.toy_model import write_toy_model
from mrl.types import WeightBucket
from mrl.weight_sync.load import Canaries
from mrl.weight_sync.rank_pair import GRACE_S, PairReceiver, PairSender
from mrl.weight_sync.staging import Staging
from tests.parallel.layouts import build, join_mesh
from tests.ranks import run_ranks, start_fork

CPU = torch.device("cpu")
PATIENT_S = 60.0
SHORT_S = 1.5
NO_CANARIES = Canaries([], [])
BUCKETS = 4


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    store, address = open_store("127.0.0.1")
    yield address
    del store


def make_tensors(version: int, num: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(100 * version + num)
    return [
        (f"w{num}", torch.randn(300, 7 + num, generator=generator)),
        (f"b{num}", torch.randn(5, generator=generator).to(torch.bfloat16)),
    ]


def make_buckets(version: int, num: int = BUCKETS) -> Iterator[WeightBucket]:
    """Yield buckets from two buffers in turn, as parallel/export.py does, digests from before."""
    buffers = [torch.empty(40_000, dtype=torch.uint8) for _ in range(2)]
    for i in range(num):
        tensors = make_tensors(version, i)
        buffer, views, start = buffers[i % 2], [], 0
        buffer.fill_(255)
        for name, tensor in tensors:
            end = start + tensor.numel() * tensor.element_size()
            views.append((name, buffer[start:end].view(tensor.dtype).view(tensor.shape)))
            views[-1][1].copy_(tensor)
            start = end
        digest = add_digests(digests_of(tensors))
        yield WeightBucket(views, version, buffer[:start], i == num - 1, digest=digest)


def expected(version: int, num: int = BUCKETS) -> dict[str, Tensor]:
    return dict(pair for i in range(num) for pair in make_tensors(version, i))


def held(staging: Staging) -> dict[str, Tensor]:
    """Return copies of what a staging offers, after the checks that an engine makes."""
    buckets = list(staging.buckets())
    assert [b.is_last for b in buckets] == [False] * (len(buckets) - 1) + [True]
    assert {b.version for b in buckets} == {staging.version}
    for bucket in buckets:
        assert bucket.digest == add_digests(digests_of(bucket.tensors))
        assert bucket.flat is not None
        assert bucket.shared_path is not None
        start = torch.from_file(bucket.shared_path, size=bucket.num_bytes, dtype=torch.uint8)
        assert torch.equal(start, bucket.flat)
    return {name: tensor.clone() for b in buckets for name, tensor in b.tensors}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


class Receiving:
    """Receives versions in a thread of this process."""

    def __init__(
        self, address: tuple[str, int], name: str, versions: Sequence[int], staging: Staging
    ) -> None:
        self.staging, self.error = staging, None
        self._receiver = PairReceiver(address, name, PATIENT_S, CPU)
        self._thread = threading.Thread(target=self._run, args=(versions,), daemon=True)
        self._thread.start()

    def _run(self, versions: Sequence[int]) -> None:
        try:
            for version in versions:
                self._receiver.receive(self.staging, version)
        except RuntimeError as error:
            self.error = error

    def finish(self, *, fails: bool = False) -> None:
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive()
        assert (self.error is not None) == fails, self.error


def test_versions_arrive_one_over_the_other(address: tuple[str, int]) -> None:
    """The second has more buckets, so that memory must be found for them."""
    workers = [Receiving(address, name, (1, 2), Staging(2)) for name in ("one", "two")]
    sender = PairSender(address, PATIENT_S, CPU)
    canaries = Canaries([torch.arange(5), torch.arange(3)], [torch.rand(5), torch.rand(3)])
    assert sender.send(make_buckets(1), 1, ["one", "two"], NO_CANARIES) == []
    assert sender.send(make_buckets(2, 6), 2, ["one", "two"], canaries) == []
    for worker in workers:
        worker.finish()
        assert worker.staging.version == 2
        assert_same(held(worker.staging), expected(2, 6))
        assert all(len(bucket.handles or ()) == 2 for bucket in worker.staging.buckets())
        got = worker.staging.canaries
        assert got is not None
        for mine, sent in ((got.sequences, canaries.sequences), (got.logprobs, canaries.logprobs)):
            assert all(torch.equal(a, b) for a, b in zip(mine, sent, strict=True))
    sender.close()


def test_a_worker_may_be_left_out_of_an_update(address: tuple[str, int]) -> None:
    """An engine that runs freely takes newer weights when it has room for them."""
    often = Receiving(address, "often", (1, 2, 3), Staging())
    seldom = Receiving(address, "seldom", (1, 3), Staging())
    sender = PairSender(address, PATIENT_S, CPU)
    assert sender.send(make_buckets(1), 1, ["often", "seldom"], NO_CANARIES) == []
    assert sender.send(make_buckets(2), 2, ["often"], NO_CANARIES) == []
    assert sender.send(make_buckets(3), 3, ["often", "seldom"], NO_CANARIES) == []
    for worker in (often, seldom):
        worker.finish()
        assert_same(held(worker.staging), expected(3))
    sender.keep(["often"])
    assert sender._groups.keys() == {"often"}
    sender.close()


def test_memory_is_used_again_when_its_bucket_has_arrived(address: tuple[str, int]) -> None:
    """The exporter lays the next bucket but one into the memory of a bucket."""
    worker = Receiving(address, "one", (1,), Staging())
    arriving = []

    def watched() -> Iterator[WeightBucket]:
        for bucket in make_buckets(1, 12):
            yield bucket
            arriving.append(len(worker.staging._headers))

    sender = PairSender(address, PATIENT_S, CPU)
    assert sender.send(watched(), 1, ["one"], NO_CANARIES) == []
    worker.finish()
    assert all(num >= built for built, num in enumerate(arriving)), arriving


def test_a_bucket_that_is_in_no_buffer_and_an_empty_one(address: tuple[str, int]) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()  # not contiguous
    buckets = [WeightBucket([], 3), WeightBucket([("w", tensor)], 3, is_last=True)]
    worker = Receiving(address, "one", (3,), Staging())
    assert PairSender(address, PATIENT_S, CPU).send(buckets, 3, ["one"], NO_CANARIES) == []
    worker.finish()
    empty, bucket = worker.staging.buckets()
    assert empty.tensors == []
    assert torch.equal(bucket.tensors[0][1], tensor)


def test_a_flipped_bit_shows_in_the_digests(address: tuple[str, int]) -> None:
    def flipped() -> Iterator[WeightBucket]:
        for i, bucket in enumerate(make_buckets(1)):
            if i == 2:
                assert bucket.flat is not None
                bucket.flat[1234] ^= 4  # after the digest was taken
            yield bucket

    worker = Receiving(address, "one", (1,), Staging())
    assert PairSender(address, PATIENT_S, CPU).send(flipped(), 1, ["one"], NO_CANARIES) == []
    worker.finish()
    wrong = [
        number
        for number, bucket in enumerate(worker.staging.buckets())
        if bucket.digest != add_digests(digests_of(bucket.tensors))
    ]
    assert wrong == [2]


class Blocked(Staging):
    """Hangs when the third bucket comes."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self._num = threading.Event(), 0

    def room(self, header: Any) -> Tensor:
        self._num += 1
        if self._num == 3:
            self.free.wait(PATIENT_S)
        return super().room(header)


def test_workers_that_hang_or_never_come_cost_the_others_nothing(
    address: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of each: the trainer waits for all of them at once."""
    healthy, blocked = Staging(), [Blocked(), Blocked()]
    workers = [Receiving(address, f"hung{i}", (1,), staging) for i, staging in enumerate(blocked)]
    workers.append(Receiving(address, "healthy", (1, 2), healthy))
    names = ["absent0", "absent1", "hung0", "hung1", "healthy"]
    sender = PairSender(address, SHORT_S, CPU)
    begin = time.monotonic()
    assert sender.send(make_buckets(1, 6), 1, names, NO_CANARIES) == names[:4]
    assert time.monotonic() - begin < 2 * (SHORT_S + GRACE_S) + 5
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "could not be sent" in line]
    assert len(lines) == 4
    assert not any("[/" in line or "GLHF" in line for line in lines)
    assert sender.send(make_buckets(2), 2, ["healthy"], NO_CANARIES) == []
    for staging in blocked:
        staging.free.set()
    for worker in workers[:2]:
        worker.finish(fails=True)
        assert worker.staging.version is None
    workers[-1].finish()
    assert_same(held(healthy), expected(2))


class Deadly(Staging):
    """Kills its process when the third bucket comes."""

    def room(self, header: Any) -> Tensor:
        if len(self._headers) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().room(header)


def receive_and_die(pipe: Connection) -> None:
    PairReceiver(pipe.recv(), "dies", PATIENT_S, CPU).receive(Deadly(), 1)


def send_and_die(pipe: Connection) -> None:
    def buckets() -> Iterator[WeightBucket]:
        for i, bucket in enumerate(make_buckets(1)):
            if i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield bucket

    PairSender(pipe.recv(), PATIENT_S, CPU).send(buckets(), 1, ["one"], NO_CANARIES)


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[Connection], None]], Connection]]:
    """Fork before this process has threads of a store; give what tells the fork its address."""
    processes = []

    def fork(function: Callable[[Connection], None]) -> Connection:
        here, there = Pipe()
        processes.append(start_fork(function, there))
        there.close()
        return here

    yield fork
    for process in processes:
        process.kill()
        process.join()


def test_a_killed_worker_breaks_its_own_pair_only(forked: Any) -> None:
    pipe = forked(receive_and_die)
    store, address = open_store("127.0.0.1")
    pipe.send(address)
    worker = Receiving(address, "lives", (1,), Staging())
    sender = PairSender(address, PATIENT_S, CPU)
    begin = time.monotonic()
    assert sender.send(make_buckets(1, 8), 1, ["dies", "lives"], NO_CANARIES) == ["dies"]
    assert time.monotonic() - begin < PATIENT_S / 2  # found out at once, by the connection
    worker.finish()
    assert_same(held(worker.staging), expected(1, 8))
    del store


def test_a_version_that_came_in_part_is_not_offered(forked: Any) -> None:
    pipe = forked(send_and_die)
    store, address = open_store("127.0.0.1")
    staging = Staging()
    staging.begin(0, None)
    staging.finish()
    assert staging.version == 0
    worker = Receiving(address, "one", (1,), staging)
    pipe.send(address)
    worker.finish(fails=True)
    assert staging.version is None
    with pytest.raises(RuntimeError, match="version 1 have not arrived completely"):
        next(staging.buckets())
    del store


def test_another_version_than_announced_is_refused(address: tuple[str, int]) -> None:
    worker = Receiving(address, "one", (2,), Staging())
    sender = PairSender(address, SHORT_S, CPU)
    assert sender.send(make_buckets(1), 1, ["one"], NO_CANARIES) == ["one"]
    worker.finish(fails=True)
    assert "version 1, expected 2" in str(worker.error)
    assert worker.staging.version is None


def test_an_export_that_fails_raises_and_drains_nothing_of_the_next(
    address: tuple[str, int],
) -> None:
    def failing() -> Iterator[WeightBucket]:
        yield next(make_buckets(1))
        raise ValueError("no export")

    worker = Receiving(address, "one", (1,), Staging())
    sender = PairSender(address, SHORT_S, CPU)
    with pytest.raises(ValueError, match="no export"):
        sender.send(failing(), 1, ["one"], NO_CANARIES)
    assert worker.staging.version is None


def sent_by_megatron(model: Path, dtype: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what Megatron exports, and what came of another export in a staging."""
    policy = build(model, join_mesh(model, {}))
    sent_dtype = getattr(torch, dtype)
    wanted = {n: t.clone() for b in policy.export(0, 4096, sent_dtype) for n, t in b.tensors}
    store, address = open_store("127.0.0.1")
    worker = Receiving(address, "one", (1,), Staging())
    sender = PairSender(address, PATIENT_S, CPU)
    assert sender.send(policy.export(1, 4096, sent_dtype), 1, ["one"], NO_CANARIES) == []
    worker.finish()
    del store
    return wanted, held(worker.staging)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.release)])
def test_an_export_of_megatron_arrives_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    write_toy_model(tmp_path / "model")
    folder = tmp_path / "ranks"
    ((wanted, found),) = run_ranks(1, sent_by_megatron, tmp_path / "model", dtype, folder=folder)
    assert len(wanted) > 20
    assert_same(found, wanted)
