"""An engine may span nodes: its processes are started, lost and stopped together.

Rank 0 of an engine's ranks leads it; the first of its ranks on each further node runs a process there.
All of them meet before a start, to agree on an address, and repeatedly while it lasts, so that the
failure of one node ends the wait of the others. An engine on one node needs none of that.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mrl.config.adapter import Adapter
from mrl.errors import EngineGone
from mrl.preflight import Plan
from mrl.rollout import load_engine, node_class
from mrl.rollout.base import (
    PORT_CLASH,
    START_ATTEMPTS,
    EngineLost,
    RolloutEngine,
    RolloutNode,
    engine_seed,
)
from mrl.run.folder import RunFolder

MEET_S = 0.1
"""Seconds between two meetings during a start; the leader sets the pace."""


class _Said(NamedTuple):
    """Is what a rank tells the others in a meeting."""

    is_over: bool = False
    """The leader sets it in the last meeting of a start."""
    failure: str = ""


class EngineNodes:
    """Is one rank's part of an engine. start() and share_loss() are collectives of its ranks."""

    def __init__(
        self,
        engine: RolloutEngine | None,
        node: RolloutNode | None,
        exchange: Callable[[Any], list[Any]] | None,
    ) -> None:
        """`engine` on the leader, `node` on the first rank of each further node.

        `exchange` gives every rank of the engine what each of them says, in rank order; None for an
        engine on one node, where only the leader does anything here.
        """
        self.engine, self._node, self._exchange = engine, node, exchange

    def start(self) -> None:
        """Start the engine. If that fails, no process is left and every rank raises RuntimeError.

        Where another program took one of its ports, all nodes start again with other ports.
        """
        if self._exchange is None:
            if self.engine is not None:
                self.engine.start()
            return
        for attempt in range(1, START_ATTEMPTS + 1):
            address = self._exchange(free_address() if self.engine is not None else "")[0]
            failure = self._lead(address) if self.engine is not None else self._follow(address)
            if not failure:
                break
            self.stop()
            if PORT_CLASH not in failure or attempt == START_ATTEMPTS:
                raise EngineGone(failure)
        if self._node is not None:
            self._node.note_ready()

    def _lead(self, address: str) -> str:
        assert self.engine is not None
        failure = ""
        try:
            self.engine.start(address, self._watch_others)
        except RuntimeError as error:
            failure = str(error)
        self._meet(_Said(is_over=True, failure=failure))
        return failure

    def _watch_others(self) -> None:
        failed = [said.failure for said in self._meet(_Said()) if said.failure]
        if failed:
            raise RuntimeError(f"engine: {'; '.join(failed)}")

    def _follow(self, address: str) -> str:
        if self._node is not None:
            self._node.start(address)
        while True:
            said = self._meet(_Said(failure=self._own_failure()))
            if said[0].is_over:
                return said[0].failure
            time.sleep(MEET_S)

    def share_loss(self, lost: EngineLost | None) -> EngineLost | None:
        """Return the engine's loss if any of its ranks knows of one; nothing of it is left then."""
        if self._exchange is None:
            return lost
        own = str(lost) if lost is not None else self._own_failure()
        failed = [said.failure for said in self._meet(_Said(failure=own)) if said.failure]
        if not failed:
            return None
        self.stop()
        return lost or EngineLost(failed[0])

    def stop(self) -> None:
        """Stop this rank's processes of the engine. Harmless when repeated."""
        for part in (self.engine, self._node):
            if part is not None:
                part.stop()

    def _own_failure(self) -> str:
        return self._node.failure() if self._node is not None else ""

    def _meet(self, own: _Said) -> list[_Said]:
        assert self._exchange is not None
        return [_Said(*said) for said in self._exchange(tuple(own))]


def free_address() -> str:
    """Return host:port of this machine as other nodes reach it, with a port that is free now.

    The host is the address from which torchrun's MASTER_ADDR is reached. On the master's own node that
    may be a loopback address; then the host is this machine's name, which other nodes must resolve.
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
    """Return a rank's part of its engine, not started.

    `rank` is its number among the ranks that engines span, `device` its own; `exchange` joins the ranks
    of its engine.
    """
    recipe, layout = plan.recipe, plan.engines
    number = rank // layout.ranks
    engine_class = load_engine(recipe.rollout.engine)
    keywords: dict[str, Any] = {
        "model": recipe.model,
        "config": recipe.rollout,
        "return_routes": recipe.captures_routes,
        # A resumed run continues with other random numbers than those it began with.
        "seed": engine_seed(recipe.seed, number, plan.resume_step or 0),
    }
    if (adapter := served_adapter(plan)) is not None:
        keywords["adapter"] = adapter
    if layout.num_nodes > 1:
        keywords["num_nodes"] = layout.num_nodes
    if layout.leads_node(rank):  # for other ranks, the GPUs from their own on are not the engine's
        keywords["gpu_ids"] = gpu_ids(device, layout.ranks_per_node)
    engine, node = None, None
    if rank % layout.ranks == 0:
        engine = engine_class(log_path=folder.logs / f"engine_{number:02d}.log", **keywords)
    elif layout.leads_node(rank):
        node_rank = layout.node_of(rank)
        log_path = folder.logs / f"engine_{number:02d}_node_{node_rank:02d}.log"
        make_node = node_class(engine_class, recipe.rollout.engine)
        node = make_node(log_path=log_path, node_rank=node_rank, **keywords)
    return EngineNodes(engine, node, exchange if layout.num_nodes > 1 else None)


def served_adapter(plan: Plan) -> Adapter | None:
    """Return the adapter that engines serve; None where they get whole weights."""
    lora = plan.recipe.lora
    return plan.adapter if lora is not None and lora.rollout == "adapter" else None


def gpu_ids(device: torch.device, num: int) -> list[str]:
    """Return the GPUs of a rank's engine on this node, from the rank's own on; none on a CPU."""
    if device.type != "cuda":
        return []
    assert device.index is not None
    numbers = range(device.index, device.index + num)
    # Ours are relative to what this process may see, the engine's to the whole machine.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [visible.split(",")[n] for n in numbers] if visible else [str(n) for n in numbers]
