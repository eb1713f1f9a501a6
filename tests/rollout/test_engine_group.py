"""An engine of several ranks: each one is given its own copy of a bucket, and nobody writes over it.

Threads are the ranks here; the processes are in tests/loop/test_torchrun.py, with a real engine.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recording_server import Client, Recorder
from safetensors.torch import save_file

from mrl.engines.base import EngineLost
from mrl.engines.sglang.manifest import Manifest
from mrl.engines.sglang.weights.update import WeightUpdater
from mrl.kernels.digest import add_digests, digests_of, weight_digest
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket
from mrl.weight_sync import engine_group
from mrl.weight_sync.engine_group import EngineGroup, GatheredBuckets

NUM_RANKS = 3
WEIGHTS = [(f"model.layers.{i}.a.weight", torch.full((5,), float(i + 1))) for i in range(6)]


def exchanges(num_ranks: int) -> list[Callable[[Any], list[Any]]]:
    """What `EngineGroup.exchange` is, for threads. A rank that never comes breaks the barrier."""
    barrier = threading.Barrier(num_ranks)
    said: list[Any] = [None] * num_ranks

    def make(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(own: Any) -> list[Any]:
            said[rank] = own
            barrier.wait(timeout=60)
            answer = list(said)
            barrier.wait(timeout=60)
            return answer

        return exchange

    return [make(rank) for rank in range(num_ranks)]


def export(memory: SharedMemory, version: int, failing: int = -1) -> Iterator[WeightBucket]:
    """One bucket a weight, in two buffers in turn, as parallel/export.py has them on a CPU."""
    for number, (name, weight) in enumerate(WEIGHTS):
        shared = memory.take(20, number % 2)
        flat = shared.tensor[:20]
        view = flat.view(torch.float32).copy_(weight)
        path = None if number == failing else shared.path
        is_last = number == len(WEIGHTS) - 1
        digest = add_digests(digests_of([(name, weight)]))
        yield WeightBucket(
            [(name, view)], version, flat, is_last=is_last, shared_path=path, digest=digest
        )


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.held = {
            f"{rank} {name}": f"float32 ? {weight_digest(weight)[0]:x}"
            for name, weight in WEIGHTS
            for rank in range(NUM_RANKS)
        }
        yield server
        server.shutdown()


@pytest.fixture
def sync(recorder, tmp_path) -> WeightUpdater:
    save_file(dict(WEIGHTS), tmp_path / "model.safetensors")
    manifest = Manifest(tmp_path, SimpleNamespace(num_hidden_layers=6, tie_word_embeddings=False))
    return WeightUpdater(Client(recorder.server_port), manifest, num_ranks=NUM_RANKS)


def opened(body: dict) -> list[dict]:
    """Each rank's payload, as SGLang's ranks open them."""
    texts = body["serialized_named_tensors"]
    return [pickle.loads(base64.b64decode(text)) for text in texts]


class Ranks:
    """A weight sync on every rank of an engine's group."""

    def __init__(self, sync: WeightUpdater) -> None:
        self.memories = [SharedMemory() for _ in range(NUM_RANKS)]
        self.num_built = [0] * NUM_RANKS
        self._sync = sync

    def run(
        self, *, failing: tuple[int, int] = (-1, -1), update: Callable[..., Any] | None = None
    ) -> list[Exception | None]:
        """What each rank ends in. Rank failing[0] cannot share bucket failing[1]."""
        update = update or self._sync.update
        exchange = exchanges(NUM_RANKS)

        def source(rank: int) -> Iterator[WeightBucket]:
            self.num_built[rank] = 0
            bad = failing[1] if rank == failing[0] else -1
            for bucket in export(self.memories[rank], 7, bad):
                self.num_built[rank] += 1
                yield bucket

        def work(rank: int) -> Exception | None:
            buckets = GatheredBuckets(source(rank), exchange[rank])
            failure = None
            try:
                if rank == 0:
                    update(buckets, 7)
            except (RuntimeError, ValueError) as error:
                failure = error
            try:
                buckets.finish()
            except RuntimeError as error:
                failure = failure or error
            return failure

        with ThreadPoolExecutor(NUM_RANKS) as pool:
            return list(pool.map(work, range(NUM_RANKS)))


def test_every_rank_reads_its_own_copy_until_the_answer(recorder, sync):
    """Each rank's copy is another file; none changes while the server loads it."""
    ranks = Ranks(sync)
    seen = []

    def load(body: dict) -> None:
        payloads = opened(body)
        first = [payload["flattened_tensor"].clone() for payload in payloads]
        time.sleep(0.03)  # as long as a rank that does not wait needs to write all buckets
        again = [payload["flattened_tensor"] for payload in opened(body)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        places = [payload["metadata"][0].name for payload in payloads]
        seen.append((places, [tensor.view(torch.float32).tolist() for tensor in first]))

    recorder.on_update = load
    assert ranks.run() == [None] * NUM_RANKS
    assert seen == [([name] * NUM_RANKS, [w.tolist()] * NUM_RANKS) for name, w in WEIGHTS]
    for path, body in recorder.calls:
        if path == "/update_weights_from_tensor":
            files = [_path_of(text) for text in body["serialized_named_tensors"]]
            own = [{b.path for b in memory._buffers.values()} for memory in ranks.memories]
            assert all(file in paths for file, paths in zip(files, own, strict=True))
    assert len({path for memory in own for path in memory}) == 2 * NUM_RANKS
    assert ranks.num_built == [len(WEIGHTS)] * NUM_RANKS


def _path_of(text: str) -> str:
    """The file that a payload opens."""
    payload = base64.b64decode(text)
    start = payload.index(b"/proc/")
    return payload[start : payload.index(b"\x94", start)].decode()


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_that_cannot_share_its_copy_fails_all(recorder, sync, rank):
    ranks = Ranks(sync)
    for failure in ranks.run(failing=(rank, 3)):
        assert isinstance(failure, RuntimeError)
        assert f"rank {rank}: ValueError: " in str(failure)
    assert ranks.num_built == [len(WEIGHTS)] * NUM_RANKS  # others may need this rank's part
    assert ranks.run() == [None] * NUM_RANKS


def test_an_export_that_fails_on_one_rank_fails_all(sync):
    exchange = exchanges(2)

    def source(rank: int) -> Iterator[WeightBucket]:
        memory = SharedMemory()
        for number, bucket in enumerate(export(memory, 7)):
            if rank == number == 1:
                raise RuntimeError("CUDA out of memory")
            yield bucket

    def work(rank: int) -> str:
        buckets = GatheredBuckets(source(rank), exchange[rank])
        with pytest.raises(RuntimeError) as caught:
            buckets.finish() if rank else list(buckets)
        if not rank:
            buckets.finish()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(work, range(2)):
            assert "rank 1: RuntimeError: CUDA out of memory" in message


@pytest.mark.parametrize("failing", ["/update_weights_from_tensor", "/weights_checker"])
def test_a_leader_that_fails_leaves_nobody_waiting(recorder, sync, failing):
    ranks = Ranks(sync)
    recorder.failing = failing
    leader, *others = ranks.run()
    assert "not today" in str(leader)
    assert others == [None] * (NUM_RANKS - 1)
    assert ranks.num_built == [len(WEIGHTS)] * NUM_RANKS

    def lost(buckets, version):
        next(buckets)
        raise EngineLost("it died")

    assert isinstance(ranks.run(update=lost)[0], EngineLost)
    assert ranks.num_built == [len(WEIGHTS)] * NUM_RANKS
    recorder.failing = ""
    assert ranks.run() == [None] * NUM_RANKS


def test_a_leader_without_an_engine_to_update(sync):
    """Its engine has nothing to generate: the export goes on without handles."""
    ranks = Ranks(sync)
    made = []
    handle_of = engine_group.handle_of
    engine_group.handle_of = lambda flat, path: made.append(path) or handle_of(flat, path)
    try:
        assert ranks.run(update=lambda buckets, version: None) == [None] * NUM_RANKS
    finally:
        engine_group.handle_of = handle_of
    assert not made
    assert ranks.num_built == [len(WEIGHTS)] * NUM_RANKS


def test_handles_of_too_few_ranks_are_refused(recorder, sync):
    bucket = next(export(SharedMemory(), 7))
    alone = GatheredBuckets(iter([bucket]), EngineGroup(None).exchange)
    with pytest.raises(
        RuntimeError, match=r"got handles of 1 ranks, expected one for each of .* 3"
    ):
        sync.update(alone, 7)
    assert not recorder.calls


def test_an_engine_group_waits_as_long_as_the_run_does(monkeypatch) -> None:
    made = []
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: made.append((args, options)))
    EngineGroup.create(1, 4, 2, timeout_s=7200.0)
    assert [args[0] for args, _ in made] == [[0, 1], [2, 3]]
    assert all(options["timeout"] == timedelta(hours=2) for _, options in made)
