"""What the watchdog sees of an engine that is started again."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrl.engine_pool import restarts
from mrl.engine_pool.local_engine import LocalEngine
from mrl.engines.base import EngineLost
from mrl.system import heartbeat
from mrl.system.clock import Clock
from mrl.system.memory_watch import MemoryWatch


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[mmap.mmap]:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    descriptor = os.open(heartbeat.open_page(), os.O_RDONLY)
    yield mmap.mmap(descriptor, heartbeat.SIZE, access=mmap.ACCESS_READ)
    os.close(descriptor)
    heartbeat.close_page()


def test_an_engine_starts_again_in_a_phase_whose_limit_has_room_for_it(
    page: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service replaces engines between its phases, where the limit of `log` would hold."""
    found: list[str] = []
    beats: list[int] = []

    class Nodes:
        server = object()

        def share_loss(self, loss: EngineLost | None) -> EngineLost | None:
            return loss

        def start(self) -> None:
            pulse = heartbeat.read_page(page)
            found.append(pulse.phase)
            beats.append(pulse.beats)
            raise EngineLost("again")

    monkeypatch.setattr(restarts.console, "warning", lambda text: None)
    nodes: Any = Nodes()
    engine = LocalEngine(nodes, 0, 2, MemoryWatch(torch.device("cpu"), print))
    with engine.noting_loss():
        raise EngineLost("it died")
    with pytest.raises(Exception, match="3 rollout engines were lost in one step"):
        engine.replace_lost(Clock())
    assert found == ["rollout:restart"] * 2
    assert beats[1] > beats[0]  # a start that failed is progress: each has a limit of its own
    assert heartbeat.read_page(page).phase != "rollout:restart"
