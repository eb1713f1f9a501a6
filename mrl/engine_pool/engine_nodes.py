"""Runs an engine that may span nodes: its processes are started, lost and stopped together.

Rank 0 of the ranks that an engine spans leads the engine: it starts the engine's server. If the
engine spans several nodes, the first of its ranks on each other node runs one more process of the
engine. Then the ranks also exchange messages: before a start, to agree on an address, and
repeatedly during the start, so that no node waits for a node that has failed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mrl.config.adapter import Adapter
from mrl.engines import load_engine, node_class
from mrl.engines.base import (
    PORT_CLASH,
    START_ATTEMPTS,
    EngineConfig,
    EngineLost,
    EngineServer,
    PolicyEndpoint,
    RolloutNode,
    engine_seed,
)
from mrl.errors import EngineGone
from mrl.preflight import Plan
from mrl.run.folder import RunFolder
from mrl.weight_sync.transports import push_of

EXCHANGE_S = 0.1
"""Seconds that a rank sleeps between two exchanges while the leader starts the engine."""


class _Status(NamedTuple):
    """The message that a rank sends to the engine's other ranks in an exchange."""

    is_over: bool = False
    """Whether the start has ended, with or without success; only the leader sets it."""
    failure: str = ""
    """Why this rank's process failed; empty if it did not fail."""


@dataclass
class EngineNodes:
    """The processes that one rank runs for an engine. start() and share_loss() are collectives of
    the engine's ranks."""

    server: EngineServer | None
    """The engine's server. None except on the leader, which is rank 0 of the engine's ranks."""
    node: RolloutNode | None
    """The engine's process on this node, if the leader is on another node. None except on the first
    of the engine's ranks on such a node."""
    exchange: Callable[[Any], list[Any]] | None
    """A collective of the engine's ranks. Each rank passes an object, and gets the objects of all
    these ranks in rank order. None for an engine on one node; then only the leader acts."""
    endpoint: PolicyEndpoint | None = None
    """The endpoint of the engine's only policy, on the leader; None if the engine serves several
    policies."""

    def start(self) -> None:
        """Start the engine. If the start fails, every rank stops its process and raises
        RuntimeError.

        If another program has taken one of the engine's ports, all nodes try again with other
        ports.
        """
        if self.exchange is None:
            if self.server is not None:
                self.server.start()
            return
        for attempt in range(1, START_ATTEMPTS + 1):
            address = self.exchange(free_address() if self.server is not None else "")[0]
            failure = self._lead(address) if self.server is not None else self._follow(address)
            if not failure:
                break
            self.stop()
            if PORT_CLASH not in failure or attempt == START_ATTEMPTS:
                raise EngineGone(failure)
        if self.node is not None:
            self.node.note_ready()

    def _lead(self, address: str) -> str:
        assert self.server is not None
        failure = ""
        try:
            self.server.start(address, self._watch_others)
        except RuntimeError as error:
            failure = str(error)
        self._share(_Status(is_over=True, failure=failure))
        return failure

    def _watch_others(self) -> None:
        failed = [each.failure for each in self._share(_Status()) if each.failure]
        if failed:
            raise RuntimeError(f"engine: {'; '.join(failed)}")

    def _follow(self, address: str) -> str:
        if self.node is not None:
            self.node.start(address)
        while True:
            leader = self._share(_Status(failure=self._own_failure()))[0]
            if leader.is_over:
                return leader.failure
            time.sleep(EXCHANGE_S)

    def share_loss(self, lost: EngineLost | None) -> EngineLost | None:
        """Return the error with which the engine was lost, or None if the engine is not lost.

        `lost` is the error that this rank has seen, or None. An engine on one node is lost if
        `lost` is not None. An engine on several nodes is lost if any of its ranks has seen an
        error, or if any of its processes has failed; then its remaining processes are stopped.
        """
        if self.exchange is None:
            return lost
        own = str(lost) if lost is not None else self._own_failure()
        failed = [each.failure for each in self._share(_Status(failure=own)) if each.failure]
        if not failed:
            return None
        self.stop()
        return lost or EngineLost(failed[0])

    def stop(self) -> None:
        """Stop the processes that this rank runs for the engine. May be called more than once."""
        for part in (self.server, self.node):
            if part is not None:
                part.stop()

    def _own_failure(self) -> str:
        return self.node.failure() if self.node is not None else ""

    def _share(self, own: _Status) -> list[_Status]:
        assert self.exchange is not None
        return self.exchange(own)


def free_address() -> str:
    """Return an address `host:port`, with a free port, at which other nodes can reach this machine.

    The host is the local address of a connection to torchrun's MASTER_ADDR. On the master's own
    node this may be a loopback address; then the host is this machine's name, which other nodes
    must be able to resolve.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # a datagram socket sends nothing here
        host = probe.getsockname()[0]
    if host.startswith("127.") and not (master.startswith("127.") or master == "localhost"):
        host = socket.gethostname()
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{host}:{listener.getsockname()[1]}"


def make_engine(
    plan: Plan,
    rank: int,
    device: torch.device,
    folder: RunFolder,
    exchange: Callable[[Any], list[Any]],
) -> EngineNodes:
    """Return the processes that a rank runs for its engine, without starting them.

    `rank` is the rank's number among the ranks that engines span. `device` is the device of the
    rank. `exchange` is a collective of the ranks that the rank's engine spans (see
    `EngineNodes.exchange`).
    """
    recipe, layout = plan.recipe, plan.engines
    number = rank // layout.ranks
    engine_class = load_engine(recipe.rollout.engine)
    leads_node = layout.leads_node(rank)
    config = EngineConfig(
        model=recipe.model,
        rollout=recipe.rollout,
        log_path=folder.logs / f"engine_{number:02d}.log",
        return_routes=recipe.captures_routes,
        # Only a rank that leads a node starts a process, so only it needs the engine's GPUs.
        gpu_ids=gpu_ids(device, layout.ranks_per_node) if leads_node else (),
        cpu_threads=plan.engine_threads,
        # A resumed run does not repeat the random numbers of its start.
        seed=engine_seed(recipe.seed, number, plan.resume_step or 0),
        num_nodes=layout.num_nodes,
        weight_push=push_of(recipe.rollout.weight_sync),
        adapter=served_adapter(plan),
    )
    engine, node = None, None
    if rank % layout.ranks == 0:
        engine = engine_class(config)
    elif leads_node:
        node_rank = layout.node_of(rank)
        log_path = folder.logs / f"engine_{number:02d}_node_{node_rank:02d}.log"
        make_node = node_class(engine_class, recipe.rollout.engine)
        node = make_node(replace(config, log_path=log_path), node_rank)
    endpoint = None if engine is None else engine.endpoint
    return EngineNodes(engine, node, exchange if layout.num_nodes > 1 else None, endpoint)


def served_adapter(plan: Plan) -> Adapter | None:
    """Return the adapter that engines serve; None if engines receive complete weights."""
    lora = plan.recipe.lora
    return plan.adapter if lora is not None and lora.rollout == "adapter" else None


def gpu_ids(device: torch.device, num: int) -> list[str]:
    """Return the ids of `num` consecutive GPUs, of which `device` is the first; empty on a CPU."""
    if device.type != "cuda":
        return []
    assert device.index is not None
    numbers = range(device.index, device.index + num)
    # torch's index counts the visible GPUs; the engine needs the index among all GPUs of the node.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [visible.split(",")[n] for n in numbers] if visible else [str(n) for n in numbers]
