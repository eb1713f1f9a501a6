"""The engine that the tenants of a rollout rank share, without an engine: whose losses count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.errors import EngineGone
from mrl.rollout.base import EngineLost, Request, SamplingParams
from mrl.rollout.gate import Gate
from mrl.tenants.tenant_work import SharedEngine


def lose(shared: SharedEngine, gate: Gate, tenant: str) -> None:
    """A request of a tenant ends the engine; the thread of another tenant finds that first."""
    request = Request("a", torch.tensor([1]), 0, SamplingParams(4))
    line = gate.line_up(tenant, [request], lambda: None)
    assert line.take() == [request]
    assert shared.replace(EngineLost("the server died")) == 1
    line.lose()
    line.close()


def test_what_a_request_ends_alone_does_not_count_towards_max_restarts() -> None:
    gate = Gate()
    for name in ("ann", "eve"):
        gate.enter(name)
    starts: list[int] = []

    def start() -> None:
        starts.append(1)

    engines: Any = SimpleNamespace(gate=gate, is_running=False, start=start)
    shared = SharedEngine(engines, 0, max_restarts=2)
    for _ in range(2):
        lose(shared, gate, "eve")  # among others, as far as anybody knows: it counts
        gate.resize(100, 8)
        lose(shared, gate, "eve")  # alone
        gate.resize(100, 8)
        with pytest.raises(RuntimeError, match="is not tried a third time"):
            gate.line_up(
                "eve", [Request("a", torch.tensor([1]), 0, SamplingParams(4))], starts.clear
            )
    assert len(starts) == 4
    with pytest.raises(EngineGone, match="3 engines were lost in one batch"):
        lose(shared, gate, "ann")
