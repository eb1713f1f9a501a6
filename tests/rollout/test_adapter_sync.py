"""One sync of an adapter, against a server that says what it is told to."""

from __future__ import annotations

import pytest
import torch
from adapter_helpers import KINDS, manifest_of, matrices_of
from torch import Tensor

from mrl.engines.sglang.adapter.update import AdapterUpdater
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.weights.update import SyncClock
from mrl.kernels.digest import add_digests, digests_of, weight_digest
from mrl.types import WeightBucket

ADAPTER = KINDS["attention"]


class Server(ServerConnection):
    """Notes what is posted, and holds what `matrices` say."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.matrices: dict[str, Tensor] = {}
        self.failing = ""

    def post(self, path, body, *, timeout_s=None):
        self.calls.append((path, body.get("lora_name") or body["action"]))
        if path == self.failing:
            raise RuntimeError("not today")
        lines = {name: f"{weight_digest(matrix)[0]:x}" for name, matrix in self.matrices.items()}
        checksums = {**lines, "scale": "2.0", "slot": ""}
        return {"ranks": [{"checksums": checksums, "parallelism_info": {"tp_rank": 0}}]}

    def offers(self, path):
        raise AssertionError(path)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def sync(server: Server, toy_folder) -> AdapterUpdater:
    return AdapterUpdater(server, manifest_of(toy_folder, ADAPTER), num_ranks=1)


def buckets_of(matrices: dict[str, Tensor], version: int, digest: dict[str, int] | None = None):
    names = sorted(matrices)
    half = len(names) // 2
    yield WeightBucket([(n, matrices[n]) for n in names[:half]], version, digest=digest)
    yield WeightBucket([(n, matrices[n]) for n in names[half:]], version, is_last=True)


def push(sync: AdapterUpdater, server: Server, matrices: dict[str, Tensor], version: int):
    server.matrices = matrices
    return sync.update(buckets_of(matrices, version), version)


def test_versions_are_loaded_beside_each_other(sync, server, toy_folder):
    matrices = matrices_of(toy_folder, ADAPTER, 1)
    assert sync.name_of(0) is None
    report = push(sync, server, matrices, 1)
    assert report.num_bytes == sum(m.nbytes for m in matrices.values())
    push(sync, server, matrices_of(toy_folder, ADAPTER, 2), 2)
    assert (sync.name_of(1), sync.name_of(2)) == ("mrl@1", "mrl@2")
    sync.drop_unused({1})
    push(sync, server, matrices, 3)
    server.calls.clear()
    sync.drop_unused({1})
    assert server.calls == [("/unload_lora_adapter", "mrl@2")]
    sync.drop_unused(())
    assert sync.name_of(3) == "mrl@3"
    with pytest.raises(
        RuntimeError, match="version 1 of the adapter is not loaded, expected one of 3"
    ):
        sync.name_of(1)
    server.calls.clear()
    push(sync, server, matrices, 3)  # again, to an engine that is idle
    assert server.calls == [
        ("/unload_lora_adapter", "mrl@3"),
        ("/load_lora_adapter_from_tensors", "mrl@3"),
        ("/weights_checker", "mrl_adapter mrl@3"),
    ]


def test_what_an_engine_holds_wrong_is_unloaded(sync, server, toy_folder):
    """A stale adapter, and that of another tenant, are other matrices under the right name."""
    matrices = matrices_of(toy_folder, ADAPTER, 1)
    push(sync, server, matrices, 1)
    newer = matrices_of(toy_folder, ADAPTER, 2)
    server.calls.clear()
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.k_proj\.lora_A\.weight: sent"):
        sync.update(buckets_of(newer, 2), 2)
    assert server.calls[-1] == ("/unload_lora_adapter", "mrl@2")
    assert sync.name_of(1) == "mrl@1"
    push(sync, server, newer, 2)
    assert sync.name_of(2) == "mrl@2"


@pytest.mark.parametrize("fault", ["digest", "missing", "version", "dtype", "is_last", "refused"])
def test_faults_that_load_nothing(sync, server, toy_folder, fault):
    matrices = matrices_of(toy_folder, ADAPTER, 1)
    names = sorted(matrices)
    version, digest, message = 1, None, "not today"
    if fault == "digest":
        half = {n: matrices_of(toy_folder, ADAPTER, 2)[n] for n in names[: len(names) // 2]}
        digest = add_digests(digests_of(half.items()))
        message = "another adapter came than the trainer exported"
    elif fault == "missing":
        del matrices[names[3]]
        message = f"expected 1 more: {names[3]}"
    elif fault == "version":
        version, message = 2, "got a bucket of version 2, expected 1"
    elif fault == "dtype":
        matrices[names[3]] = matrices[names[3]].to(torch.bfloat16)
        message = r"got torch\.bfloat16, expected torch\.float32"
    buckets = list(buckets_of(matrices, version, digest))
    if fault == "is_last":
        last = buckets.pop()
        buckets.append(WeightBucket(last.tensors, 1))
        message = "without one that says is_last"
    if fault == "refused":
        server.failing = "/load_lora_adapter_from_tensors"
    with pytest.raises((ValueError, RuntimeError), match=message):
        sync.update(buckets, 1)
    assert len(server.calls) == (fault == "refused")
    assert sync.name_of(1) is None


def test_memory_of_buckets_may_be_used_again(sync, server, toy_folder):
    """Buckets of an export lie in two buffers in turn, and SGLang keeps what it reads."""
    matrices = matrices_of(toy_folder, ADAPTER, 1)
    whole = torch.cat([matrices[n].flatten() for n in sorted(matrices)])

    def in_one_buffer():
        buffer = torch.empty(max(m.numel() for m in matrices.values()))
        for number, name in enumerate(sorted(matrices)):
            view = buffer[: matrices[name].numel()].view(matrices[name].shape)
            view.copy_(matrices[name])
            yield WeightBucket([(name, view)], 1, is_last=number == len(matrices) - 1)

    laid_out, _, _ = sync._take(in_one_buffer(), 1, SyncClock())
    assert torch.equal(torch.cat([laid_out.views[n].flatten() for n in sorted(matrices)]), whole)
