"""Starts the watchdog of a run: each rank opens its page, and the first of a node starts a monitor.

Ranks that lead engines are in no process group, so they register in the launcher's store
(`EngineRanks`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.config.rollout import EngineConfig
from mrl.config.watch import WatchConfig
from mrl.errors import RankLost
from mrl.system import heartbeat
from mrl.system.launcher import signal_arrived, signal_watchdog_running
from mrl.system.rendezvous import listen_for
from mrl.watch.collectives import noting_collectives
from mrl.watch.restarted import RestartedMonitor

PREFIX = "mrl_watch"
RANK, JOB = "rank", "job"
"""Keys of the store: the page of a rank that leads engines, and the job of its monitor."""
_Node = tuple[str, str, str]
_FILES_S = 600.0
"""How long a file system may take over a save without being called hung."""


class EngineRanks:
    """The ranks that lead engines, as the trainers' rank 0 finds them in the launcher's store."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], wait_s: float) -> None:
        """`wait_s`: how long they may take to register."""
        self._store, self._ranks, self._wait_s = dist.PrefixStore(PREFIX, store), ranks, wait_s

    def gather(self) -> list[tuple[_Node, dict[str, Any]]]:
        """Return the node of each rank, and what its monitor needs. Raises RankLost past the limit, or
        if the launcher's store is gone."""
        self._store.set_timeout(timedelta(seconds=self._wait_s))
        said = []
        for rank in self._ranks:
            try:
                said.append(json.loads(self._store.get(f"{RANK}_{rank}")))
            except RuntimeError as error:
                why = str(error).splitlines()[0]
                raise RankLost(
                    f"rank {rank}, which leads engines, has not connected: {why}"
                ) from error
        return [((node[0], node[1], node[2]), own) for node, own in said]

    def tell(self, rank: int, job: Mapping[str, Any]) -> None:
        """Have a rank start the monitor of a node on which no rank trains."""
        self._store.set(f"{JOB}_{rank}", json.dumps(job))


@contextmanager
def watched_engine_rank(
    config: WatchConfig, store: dist.Store, rank: int
) -> Iterator[Callable[[], None]]:
    """Watch this rank, which leads engines, during the block; the block raises if the rank fails.

    Yields a function to call repeatedly until the trainers have started.
    """
    signal_arrived(rank)
    if not config.enabled:
        signal_watchdog_running()
        yield heartbeat.beat
        return
    monitors: list[RestartedMonitor] = []
    meeting = dist.PrefixStore(PREFIX, store)
    with ExitStack() as undo:
        own = _open(undo, rank)
        heartbeat.supervise()
        meeting.set(f"{RANK}_{rank}", json.dumps([_node(), own]))

        def look() -> None:
            heartbeat.beat()
            if not monitors and meeting.check([f"{JOB}_{rank}"]):
                job = json.loads(meeting.get(f"{JOB}_{rank}"))
                job |= {"parent": os.getpid(), "addresses": _addresses(job)}
                monitors.append(undo.enter_context(RestartedMonitor(job)))
                signal_watchdog_running()

        yield look
        heartbeat.leave()
        for monitor in monitors:
            monitor.finish()


@contextmanager
def watching(
    config: WatchConfig,
    least: Mapping[str, float],
    folder: Path,
    command: str,
    engine_ranks: EngineRanks | None = None,
) -> Iterator[None]:
    """Watch the ranks during the block; `command` continues the run in `folder`. A collective.

    `least`: the seconds that the own waits of a phase may take, by its name. `engine_ranks`: the ranks
    that are in no process group.
    """
    if not config.enabled:
        signal_watchdog_running()
        yield
        return
    with ExitStack() as undo:
        own = _open(undo, dist.get_rank())
        undo.enter_context(noting_collectives())
        others = engine_ranks.gather() if engine_ranks is not None and own["rank"] == 0 else []
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (_node(), own, others))
        trained = [node for node, *_ in ranks]
        nodes: dict[_Node, list[dict[str, Any]]] = {}
        for node, rank, *_ in [*ranks, *ranks[0][2]]:
            nodes.setdefault(node, []).append(rank)
        server, line = _meet(nodes, undo)
        job = {"folder": str(folder), "command": command, **line}
        if own["rank"] == 0:
            for node in [node for node in nodes if node not in trained]:
                assert engine_ranks is not None
                number = list(nodes).index(node) - 1
                engine_ranks.tell(
                    nodes[node][0]["rank"], {**job, "ranks": nodes[node], "node": number}
                )
            limits = {"least": dict(least), "first_s": config.first_limit_s}
            job |= {"limits": {"given": config.limits, **limits}}
        monitor = None
        if nodes[_node()][0]["rank"] == own["rank"]:
            job |= {"parent": os.getpid(), "ranks": nodes[_node()]}
            job |= {} if own["rank"] == 0 else {"addresses": _addresses(job)}
            monitor = undo.enter_context(RestartedMonitor(job, server))
            signal_watchdog_running()
        yield
        heartbeat.leave()
        if monitor is not None:
            monitor.finish()


def _open(undo: ExitStack, rank: int) -> dict[str, Any]:
    """Open the page of this rank, and return what its monitor needs."""
    page = heartbeat.open_page()
    undo.callback(heartbeat.close_page)
    return {"rank": rank, "pid": os.getpid(), "page": page, "stacks": _heed_stacks(undo)}


def _node() -> _Node:
    """Return what tells nodes apart: the host, the launcher where a host has several, and the
    kernel with its process numbers, as hosts may share a name."""
    kernel = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kernel = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname(), os.environ.get("GROUP_RANK", "0"), kernel


def _meet(
    nodes: dict[_Node, list[dict[str, Any]]], undo: ExitStack
) -> tuple[socket.socket | None, dict[str, Any]]:
    """Return what the monitors of several nodes need to find each other: (the socket at which rank 0's
    listens, on rank 0, what its job says). A collective where there are several."""
    if len(nodes) == 1:
        return None, {"nodes": []}
    server, own = None, list(nodes).index(_node())
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        server = undo.enter_context(listen_for({host for host, *_ in nodes}))
        said = [(secrets.token_hex(32), server.getsockname()[:2])]
    dist.broadcast_object_list(said)
    token, (host, port) = said[0]
    line = {"token": token, "head": [host, port], "host": next(iter(nodes))[0]}
    if server is None:
        return None, {**line, "node": own - 1}
    rest = [
        {"host": name, "ranks": [rank["rank"] for rank in ranks]}
        for (name, *_), ranks in list(nodes.items())[1:]
    ]
    return server, {**line, "nodes": rest, "server": server.fileno()}


def _addresses(job: Mapping[str, Any]) -> list[list[Any]]:
    """Return possible addresses of rank 0's monitor, which may have another address on this node."""
    host, port = job["head"]
    known = dict.fromkeys((host, os.environ.get("MASTER_ADDR", ""), job["host"]))
    return [[each, port] for each in known if each]


def least_limits(recipe: Recipe) -> dict[str, float]:
    """Return, by phase, the seconds that its own waits may take by the recipe: calls of an engine, the
    start of another one, reward calls. The watchdog must not end what these would recover."""
    rewards = (recipe.rollout.samples_per_prompt + 1) * recipe.reward_timeout_s
    return _least_limits(recipe.watch, recipe.rollout, rewards)


def least_limits_of_service(config: ServiceConfig) -> dict[str, float]:
    """Return what `least_limits` does for a service, whose tenants' rewards have a limit for a step."""
    return _least_limits(config.watch, config.rollout, config.tenants.max_reward_s)


def _least_limits(watch: WatchConfig, rollout: EngineConfig, rewards: float) -> dict[str, float]:
    engine = rollout.stall_timeout_s + rollout.start_timeout_s
    request = rollout.request_timeout_s + engine
    return {
        "start": watch.first_limit_s,
        "sync": engine,
        "rollout": request + rewards,
        "evaluate": request + rewards,
        "score": rewards,
        "save": _FILES_S,
        "log": watch.first_limit_s,  # user code, as in callbacks, and trackers
    }


def _heed_stacks(undo: ExitStack) -> str:
    """Let SIGUSR2 write the stacks of all threads to a file without a name; return its path."""
    descriptor = os.memfd_create("mrl-stacks")
    undo.callback(os.close, descriptor)
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    undo.callback(faulthandler.unregister, signal.SIGUSR2)
    return f"/proc/{os.getpid()}/fd/{descriptor}"
