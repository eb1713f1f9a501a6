"""A job whose workers and rollout ranks are played by a test: what they say and hear."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from mrl.config.asynchronous import AsyncConfig
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.coordinator import Coordinator
from mrl.engine_pool.remote.messages import Delivered, Work
from mrl.engine_pool.remote.wire import RANK, Wire
from mrl.scheduling.schedule import FixedSchedule
from tests.sample_groups import group
from tests.waiting import wait_until

HERE = [socket.gethostname()]
RANKS: list[Any] = []
"""Rollout ranks, which are there as long as their objects."""
IDLE = {"now": "bound", "seconds": {}, "spans": []}


class Rank:
    """A rollout rank that can start engines, as rank 0 sees it."""

    def __init__(
        self, server: Any, engine: int = 0, host: str = "here", gpus: tuple[str, ...] = ()
    ) -> None:
        self.wire = Wire(socket.create_connection(server.address))
        own = {"engine": engine, "host": host, "gpus": gpus, "rank_gpus": gpus}
        self.wire.send({"type": RANK, "token": server.token, **own})

    def heard(self) -> tuple[str, int]:
        message, _ = self.wire.receive()
        return message["type"], message["engine"]

    def say_ended(self, engine: int, why: str = "") -> None:
        self.wire.send({"type": "ended", "engine": engine, "why": why})


class Worker:
    """A worker without an engine."""

    def __init__(self, coordinator: Coordinator[Any], engine: int) -> None:
        self.wire = Wire(socket.create_connection(coordinator.address))
        self.wire.send({"type": "hello", "token": coordinator.token, "engine": engine})
        self.welcome, _ = self.wire.receive()
        self.wire.send({"type": "started"})

    def heard(self, kind: str) -> tuple[dict[str, Any], bytes]:
        message, body = self.wire.receive()
        assert message["type"] == kind, message
        return message, body

    def heard_work(self) -> Work:
        return Work.of_frame(*self.heard("work"))

    def say_loaded(self, version: int) -> None:
        """Report a version that the engine has loaded, and room for another one."""
        self.wire.send({"type": "pulse", "progress": 1, "version": version, "activity": IDLE})
        self.wire.send({"type": "free"})

    def deliver(self, work: Work) -> None:
        self.wire.send(*Delivered([group([1.0, 0.0], 3)], 0).frame(work.work_id, 0))
        self.wire.send({"type": "done", "work_id": work.work_id})


def fixed(num_engines: int, ahead: int = 0) -> Coordinator[FixedSchedule]:
    """Return the coordinator of a run by a fixed schedule."""
    config = AsyncConfig(max_staleness=ahead, deterministic=bool(ahead), max_worker_restarts=1)
    return Coordinator(Membership(num_engines), config, HERE, FixedSchedule(num_engines))


def parts(version: int) -> Callable[[int, int, int, int], Work]:
    """Return what makes the work items of a batch, whose `num_wanted` is that of its part."""

    def make(work_id: int, engine: int, part: int, num_parts: int) -> Work:
        return Work(work_id, engine, "batch", version, part + 1, part=part, num_parts=num_parts)

    return make


def send_weights(coordinator: Coordinator[Any], version: int) -> list[int]:
    """Send weights to those that are to get them. Return the numbers of their engines."""
    pairs = coordinator.begin_update(version)
    coordinator.end_update([])
    return sorted(pair.engine for pair in pairs)


def states(membership: Membership) -> dict[int, str]:
    found = membership.describe()
    return {row["number"]: row["state"] for row in [*found["ended"], *found["engines"]]}


def begin(coordinator: Coordinator[Any], num_engines: int) -> list[Worker]:
    """Start the workers of a job with weights 0."""
    workers = [Worker(coordinator, n) for n in range(num_engines)]
    coordinator.wait_until_started(60)
    wait_until(lambda: sum(p.can_receive for p in coordinator._workers.values()) == num_engines)
    assert send_weights(coordinator, 0) == list(range(num_engines))
    for worker in workers:
        worker.heard("receive")
        worker.say_loaded(0)
    wait_until(lambda: all(peer.version == 0 for peer in coordinator._workers.values()))
    wait_until(lambda: all(peer.can_receive for peer in coordinator._workers.values()))
    return workers


def with_rank(coordinator: Coordinator[Any], engine: int = 0) -> Rank:
    """Return a rollout rank that rank 0 knows."""
    rank = Rank(coordinator, engine)
    RANKS.append(rank)
    wait_until(lambda: engine in coordinator.membership._ranks)
    return rank
