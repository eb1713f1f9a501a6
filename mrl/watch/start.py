"""Start a run's watchdog.

Each rank opens its heartbeat page, and the first rank of each node starts a monitor. Ranks that
lead engines are in no process group, so they register in the launcher's store (`EngineRanks`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.config.rollout import SharedRolloutConfig
from mrl.config.watch import WatchConfig
from mrl.errors import RankLost
from mrl.system import heartbeat
from mrl.system.launcher import signal_arrived, signal_watchdog_running
from mrl.system.proc import kernel_and_namespace
from mrl.system.rendezvous import listen_for
from mrl.watch.collectives import noting_collectives
from mrl.watch.process import ALL_STACKS, MAIN_STACK
from mrl.watch.restarted import RestartedMonitor

PREFIX = "mrl_watch"
RANK, JOB = "rank", "job"
"""Prefixes of keys in the launcher's store. Rank N, which leads engines, writes `rank_N`: what the
monitor must know about rank N. Rank 0 writes `job_N`: the input of the monitor that rank N must
start."""
_Node = tuple[str, str, str]
_FILES_S = 600.0
"""The seconds that a save may take before its file system counts as hung."""


class EngineRanks:
    """Lets rank 0 communicate, through the launcher's store, with the ranks that lead engines."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], wait_s: float) -> None:
        """Set up access to the store.

        `ranks` are the ranks that lead engines. `wait_s` is the number of seconds that a rank may
        take to register.
        """
        self._store, self._ranks, self._wait_s = dist.PrefixStore(PREFIX, store), ranks, wait_s

    def gather(self) -> list[tuple[_Node, dict[str, Any]]]:
        """Return (identity of the rank's node, what the node's monitor must know about the rank)
        for each rank that leads engines.

        Raises RankLost if a rank does not register in time, or if the launcher's store is gone.
        """
        self._store.set_timeout(timedelta(seconds=self._wait_s))
        registered = []
        for rank in self._ranks:
            try:
                registered.append(json.loads(self._store.get(f"{RANK}_{rank}")))
            except RuntimeError as error:
                why = str(error).splitlines()[0]
                raise RankLost(
                    f"rank {rank}, which leads engines, has not connected: {why}"
                ) from error
        return [((node[0], node[1], node[2]), own) for node, own in registered]

    def start_monitor(self, rank: int, job: Mapping[str, Any]) -> None:
        """Make rank `rank` start the monitor of its node; used for nodes on which no rank trains."""
        self._store.set(f"{JOB}_{rank}", json.dumps(job))


@contextmanager
def watched_engine_rank(
    config: WatchConfig, store: dist.Store, rank: int
) -> Iterator[Callable[[], None]]:
    """Let the watchdog watch this rank, which leads engines, during the block.

    Yields a function that the block must call repeatedly. The function reports progress, and starts
    the monitor of this node once the trainers ask for it. The block must raise if the rank fails.
    """
    signal_arrived(rank)
    if not config.enabled:
        signal_watchdog_running()
        yield heartbeat.beat
        return
    monitors: list[RestartedMonitor] = []
    keys = dist.PrefixStore(PREFIX, store)
    with ExitStack() as undo:
        own = _open(undo, rank)
        heartbeat.supervise()
        keys.set(f"{RANK}_{rank}", json.dumps([_node(), own]))

        def look() -> None:
            heartbeat.beat()
            if not monitors and keys.check([f"{JOB}_{rank}"]):
                job = json.loads(keys.get(f"{JOB}_{rank}"))
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
    """Watch all ranks during the block. A collective.

    Args:
        config: the recipe's `watch`.
        least: lower bounds on the time limits of the phases, in seconds, from `least_limits`.
        folder: the run folder.
        command: the command that continues the run.
        engine_ranks: the ranks that lead engines; None if no ranks do.
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
        server, contact = _share_contact(nodes, undo)
        job = {"folder": str(folder), "command": command, **contact}
        if own["rank"] == 0:
            for node in [node for node in nodes if node not in trained]:
                assert engine_ranks is not None
                number = list(nodes).index(node) - 1
                engine_ranks.start_monitor(
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
    """Open the heartbeat page of this rank, and return what its monitor must know about the rank."""
    page = heartbeat.open_page()
    undo.callback(heartbeat.close_page)
    return {"rank": rank, "pid": os.getpid(), "page": page, "stacks": _write_stacks_on_signal(undo)}


def _node() -> _Node:
    """Return the identity of this node.

    It consists of the host name, the launcher's rank (a host may run several launchers), and the
    kernel's boot id with the PID namespace (several hosts may have the same name).
    """
    rank = os.environ.get("GROUP_RANK", "0")
    return socket.gethostname(), rank, kernel_and_namespace("pid")


def _share_contact(
    nodes: dict[_Node, list[dict[str, Any]]], undo: ExitStack
) -> tuple[socket.socket | None, dict[str, Any]]:
    """Share the token and the address with which the other nodes' monitors reach rank 0's monitor.

    Returns two values. The first is the socket on which rank 0's monitor will listen; None on other
    ranks, and if there is only one node. The second is a dict with the entries to add to the input
    of this node's monitor. A collective if there are several nodes.
    """
    if len(nodes) == 1:
        return None, {"nodes": []}
    server, own = None, list(nodes).index(_node())
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        server = undo.enter_context(listen_for({host for host, *_ in nodes}))
        shared = [(secrets.token_hex(32), server.getsockname()[:2])]
    dist.broadcast_object_list(shared)
    token, (host, port) = shared[0]
    contact = {"token": token, "head": [host, port], "host": next(iter(nodes))[0]}
    if server is None:
        return None, {**contact, "node": own - 1}
    rest = [
        {"host": name, "ranks": [rank["rank"] for rank in ranks]}
        for (name, *_), ranks in list(nodes.items())[1:]
    ]
    return server, {**contact, "nodes": rest, "server": server.fileno()}


def _addresses(job: Mapping[str, Any]) -> list[list[Any]]:
    """Return the distinct [host, port] pairs at which this node may reach rank 0's monitor."""
    host, port = job["head"]
    known = dict.fromkeys((host, os.environ.get("MASTER_ADDR", ""), job["host"]))
    return [[each, port] for each in known if each]


def least_limits(recipe: Recipe) -> dict[str, float]:
    """Return a lower bound, in seconds, on the watchdog's time limit in each phase of a run.

    A phase may contain waits that have time limits of their own: calls of an engine, the start of
    another engine, and reward calls. If such a wait reaches its own limit, the run recovers. So the
    watchdog must not end the run before then.
    """
    rewards = (recipe.rollout.samples_per_prompt + 1) * recipe.reward_timeout_s
    return _least_limits(recipe.watch, recipe.rollout, rewards)


def least_limits_of_service(config: ServiceConfig) -> dict[str, float]:
    """Return a lower bound, in seconds, on the watchdog's time limit in each phase of a service.

    A service has one time limit for all rewards of a step.
    """
    return _least_limits(config.watch, config.rollout, config.tenants.max_reward_s)


def _least_limits(
    watch: WatchConfig, rollout: SharedRolloutConfig, rewards: float
) -> dict[str, float]:
    engine = rollout.stall_timeout_s + rollout.start_timeout_s
    request = rollout.request_timeout_s + engine
    return {
        "start": watch.first_limit_s,
        "sync": engine,
        "rollout": request + rewards,
        "evaluate": request + rewards,
        "score": rewards,
        "save": _FILES_S,
        "log": watch.first_limit_s,  # trackers, and user code in callbacks
    }


def _write_stacks_on_signal(undo: ExitStack) -> str:
    """Make MAIN_STACK and ALL_STACKS write stack traces to an anonymous file; return its path in
    /proc."""
    descriptor = os.memfd_create("mrl-stacks")
    undo.callback(os.close, descriptor)
    for number in (MAIN_STACK, ALL_STACKS):
        faulthandler.register(number, file=descriptor, all_threads=number == ALL_STACKS)
        undo.callback(faulthandler.unregister, number)
    return f"/proc/{os.getpid()}/fd/{descriptor}"
