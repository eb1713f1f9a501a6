"""Weight syncs with a real SGLang: two ways, and nothing wrong goes unseen."""

from __future__ import annotations

import os

import psutil
import pytest
from rollout_helpers import make_buckets, make_engine

from benchmarks.weight_faults import FAULTS, is_caught, moved, shared_buckets, updater_for
from mrl.engines.sglang.digests import ACTION, held_digests
from mrl.kernels.digest import add_digests, digests_of
from mrl.system.shared_memory import SharedMemory


def held_by(engine) -> dict[str, int]:
    return held_digests(engine.connection.post("/weights_checker", {"action": ACTION}), 1)[0]


def test_faults_are_caught_and_a_good_update_follows(engine, toy_weights, toy_folder):
    """benchmarks/weight_sync.py makes a hundred tries of this."""
    sync = updater_for(engine, toy_folder)
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
        engine.endpoint.update_weights(iter(spoiled), 1)
    assert engine.endpoint.weight_version is None
    engine.endpoint.update_weights(make_buckets(toy_weights, 2), 2)
    assert engine.endpoint.weight_version == 2


@pytest.mark.parametrize("method", ["tensor", "disk"])
def test_both_methods(engine, toy_weights, toy_folder, method):
    sync = updater_for(engine, toy_folder, method)
    for version in (3, 4):
        weights = moved(toy_weights, version)
        sync.update(make_buckets(weights, version), version)
        assert held_by(engine) == add_digests(digests_of(weights))
    processes = [psutil.Process(), *engine.connection.process.tree()]
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
    updater_for(engine, toy_folder).update(shared_buckets(weights, 7, memory), 7)
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


@pytest.mark.release
def test_an_engine_with_expert_parallelism_and_dp_attention(toy_folder, toy_weights, tmp_path):
    """The ranks hold other experts, the same attention, and shares of the output layer.

    Only the server starts: what is asked here is how such ranks hold and report weights. Cases of
    benchmarks/conformance.py generate with them, on stand-ins for parts of SGLang's CPU build.
    """
    engine = make_engine(toy_folder, tmp_path / "engine.log", tensor_parallel_size=2)
    parallel = {"ep_size": 2, "enable_dp_attention": True, "dp_size": 2}
    engine.connection.start(240.0, parallel)
    try:
        sync = updater_for(engine, toy_folder)
        weights = moved(toy_weights, 1)
        sync.update(shared_buckets(weights, 1, SharedMemory()), 1)
        answer = engine.connection.post("/weights_checker", {"action": ACTION})
        assert held_digests(answer, 2)[0] == add_digests(digests_of(weights))
        texts = answer["ranks"][0]["checksums"]
        experts = [texts[f"{rank} model.layers.0.mlp.experts.w2_weight"] for rank in (0, 1)]
        assert [text.split()[-1] for text in experts] == ["0,1,2,3", "4,5,6,7"]
        attention = [texts[f"{rank} model.layers.0.self_attn.qkv_proj.weight"] for rank in (0, 1)]
        assert attention[0] == attention[1]
        output = [texts[f"{rank} lm_head.weight"].split()[1] for rank in (0, 1)]
        assert len(set(output)) == 2
        for number, kind in enumerate(FAULTS):
            assert is_caught(sync, toy_weights, number, kind, seed=number), kind
    finally:
        engine.stop()
