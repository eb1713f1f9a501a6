"""An engine loads weights from the memory that a worker keeps them in, and proves what it holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.weight_faults import moved, shared_buckets
from mrl.engines.handles import flat_of
from mrl.engines.sglang.digests import ACTION, held_digests
from mrl.engines.sglang.engine import Engine
from mrl.kernels.digest import add_digests, digests_of
from mrl.system.shared_memory import SharedMemory
from mrl.weight_sync.staging import Staging, header_of


def staged(weights: list[tuple[str, Tensor]], version: int) -> Staging:
    """Return what a worker has after a version has come, here without a network."""
    staging = Staging()
    staging.begin(version, None)
    for bucket in shared_buckets(weights, version, SharedMemory()):
        staging.room(header_of(bucket)).copy_(flat_of(bucket))
    staging.finish()
    return staging


@pytest.mark.release
def test_an_engine_loads_staged_weights_and_sees_a_flipped_bit(
    engine: Engine, toy_weights: list[tuple[str, Tensor]]
) -> None:
    weights = moved(toy_weights, 31)
    staging = staged(weights, 31)
    for _ in range(2):  # a lost engine's successor loads the same memory again
        engine.endpoint.update_weights(staging.buckets(), 31)
        answer = engine.connection.post("/weights_checker", {"action": ACTION})
        assert held_digests(answer, 1)[0] == add_digests(digests_of(weights))
    flat = next(staging.buckets()).flat
    assert flat is not None
    flat.view(torch.int32)[1234] ^= 1 << 20
    with pytest.raises(RuntimeError, match="by their digests"):
        engine.endpoint.update_weights(staging.buckets(), 31)
    assert engine.endpoint.weight_version is None
