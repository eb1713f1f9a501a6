"""Weight syncs with a real SGLang: three ways, and nothing wrong goes unseen."""

from __future__ import annotations

import importlib.util
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
from rollout_helpers import make_buckets

import mrl.rollout
from benchmarks.weight_faults import FAULTS, is_caught, moved, shared_buckets, sync_for
from mrl.kernels.digest import add_digests, digests_of, weight_digest
from mrl.rollout.sglang_server.held import ACTION, held_digests
from mrl.shared_memory import SharedMemory


def held_by(engine) -> dict[str, int]:
    return held_digests(engine._server.post("/weights_checker", {"action": ACTION}), 1)[0]


def test_faults_are_caught_and_a_good_update_follows(engine, toy_weights, toy_folder):
    """benchmarks/weight_sync.py makes a hundred tries of this."""
    sync = sync_for(engine, toy_folder)
    by_name = ("expected 1 more", "twice")
    for number in range(2 * len(FAULTS)):
        kind = FAULTS[number % len(FAULTS)]
        message = is_caught(sync, toy_weights, number, kind, seed=number)
        assert message is not None, (kind, number)
        assert ("by their digests" in message) != any(text in message for text in by_name), message
    good = moved(toy_weights, 99)
    report = sync.update(shared_buckets(good, 99, SharedMemory()), 99)
    assert report.num_bytes == sum(t.numel() * 4 for _, t in good)
    assert held_by(engine) == add_digests(digests_of(good))


def test_engine_refuses_to_generate_after_a_bad_update(engine, toy_weights):
    buckets = list(make_buckets(toy_weights, 1))
    assert buckets[0].digest is None
    digest = add_digests(digests_of(buckets[0].tensors))
    digest["model.embed_tokens"] ^= 1
    spoiled = [type(buckets[0])(buckets[0].tensors, 1, digest=digest), *buckets[1:]]
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens: sent \w{16}, the engine holds"):
        engine.update_weights(iter(spoiled), 1)
    assert engine.weight_version is None
    engine.update_weights(make_buckets(toy_weights, 2), 2)
    assert engine.weight_version == 2


@pytest.mark.parametrize("method", ["tensor", "distributed", "disk"])
def test_three_ways(engine, toy_weights, toy_folder, method):
    sync = sync_for(engine, toy_folder, method)
    for version in (3, 4):
        weights = moved(toy_weights, version)
        sync.update(make_buckets(weights, version), version)
        assert held_by(engine) == add_digests(digests_of(weights))
    processes = [psutil.Process(), *engine._server.process.tree()]
    sockets = [s for process in processes for s in process.net_connections(kind="inet")]
    listening = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    assert is_caught(sync, toy_weights, 5, "dropped on the way", seed=1)
    sync.update(make_buckets(toy_weights, 6), 6)
    sync.close()


def test_buffer_may_be_used_again_after_the_answer(engine, toy_weights, toy_folder):
    """Whoever reads the buffer after that would hold what is scribbled here."""
    memory = SharedMemory()
    before = set(os.listdir("/dev/shm"))
    weights = moved(toy_weights, 7)
    sync_for(engine, toy_folder).update(shared_buckets(weights, 7, memory), 7)
    memory.take(1).tensor.fill_(255)
    assert held_by(engine) == add_digests(digests_of(weights))
    assert not [name for name in set(os.listdir("/dev/shm")) - before if str(os.getpid()) in name]


def test_shared_memory_leaves_nothing_open():
    num_open = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory()
    small = memory.take(10)
    assert memory.take(5) is small
    assert memory.take(5000) is not small
    del small, memory
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.fixture
def plugin() -> ModuleType:
    path = Path(mrl.rollout.__file__).parent / "server_plugin" / "mrl_weight_digest.py"
    spec = importlib.util.spec_from_file_location("mrl_weight_digest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rank_that_cannot_answer_leaves_no_other_waiting(plugin):
    """Two threads are the ranks. One that never comes would break the barrier of the other."""
    barrier, ranks = threading.Barrier(2), [None, None]

    def answer(rank: int, dtype: torch.dtype):
        def all_gather(own):
            ranks[rank] = own
            barrier.wait(timeout=5)
            return list(ranks)

        model = torch.nn.Linear(2, 2, bias=False)
        model.weight = torch.nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False)
        return plugin.of_all_ranks(model, all_gather)

    with ThreadPoolExecutor(2) as pool:
        good = list(pool.map(answer, (0, 1), [torch.float32] * 2))
        assert good[0] == good[1] == [{"weight": good[0][0]["weight"]}] * 2
        for failed in [pool.submit(answer, 0, torch.float32), pool.submit(answer, 1, torch.int8)]:
            with pytest.raises(RuntimeError, match=r"^rank 1: ValueError: .*got torch\.int8"):
                failed.result()


def test_plugin_tells_replicated_heads_apart(plugin):
    """Only GPUs have ranks with the same key and value heads; CPUs pad them with zeros."""
    model = torch.nn.Module()
    model.qkv_proj = torch.nn.Linear(4, 6, bias=False)
    model.qkv_proj.num_heads, model.qkv_proj.head_size = 1, 2
    model.qkv_proj.num_kv_head_replicas = 2
    model.mlp = torch.nn.Module()
    model.mlp.experts = torch.nn.Module()
    model.mlp.experts.w13_weight = torch.nn.Parameter(torch.randn(3, 4, 5))
    rows, experts = model.qkv_proj.weight, model.mlp.experts.w13_weight
    assert plugin.digests(model) == {
        "qkv_proj.weight#q": f"float32 8 1 {weight_digest(rows[:2])[0]:x}",
        "qkv_proj.weight#kv": f"float32 16 2 {weight_digest(rows[2:])[0]:x}",
        "mlp.experts.w13_weight": "float32 60 1 "
        + ",".join(f"{weight_digest(expert)[0]:x}" for expert in experts),
    }
