"""The engine that the tenants of a rollout rank share, without an engine: whose losses count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.engine_pool.remote.engine_owner import EngineOwner
from mrl.engines.base import EngineLost, Request
from mrl.engines.gate import Gate
from mrl.engines.sampling import SamplingParams
from mrl.errors import EngineGone


def lose(owner: EngineOwner, gate: Gate, tenant: str) -> None:
    """A request of a tenant ends the engine; the thread of another tenant finds that first."""
    request = Request("a", torch.tensor([1]), 0, SamplingParams(4))
    queue = gate.enqueue(tenant, [request], lambda: None)
    assert queue.take() == [request]
    assert owner.replace(EngineLost("the server died")) == 1
    queue.lose()
    queue.close()


def test_what_a_request_ends_alone_does_not_count_towards_max_restarts() -> None:
    gate = Gate()
    for name in ("ann", "eve"):
        gate.enter(name)
    starts: list[int] = []

    def start() -> None:
        starts.append(1)

    engines: Any = SimpleNamespace(gate=gate, is_running=False, start=start)
    owner = EngineOwner(
        engines,
        0,
        max_restarts=2,
        is_running=lambda: engines.is_running,
        has_culprit=lambda: gate.has_culprit,
    )
    for _ in range(2):
        lose(owner, gate, "eve")  # among others, as far as anybody knows: it counts
        gate.resize(100, 8)
        lose(owner, gate, "eve")  # alone
        gate.resize(100, 8)
        with pytest.raises(RuntimeError, match="is not tried a third time"):
            gate.enqueue(
                "eve", [Request("a", torch.tensor([1]), 0, SamplingParams(4))], starts.clear
            )
    assert len(starts) == 4
    with pytest.raises(EngineGone, match="3 engines were lost in one batch"):
        lose(owner, gate, "ann")
