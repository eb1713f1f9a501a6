"""This module holds what the server knows of its workers, and the store in which pairs meet."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from mrl.disaggregated.wire import Wire
from mrl.errors import EngineGone, InputError, RankLost, RunFailed

ERRORS: dict[str, type[Exception]] = {
    "InputError": InputError,
    "RunFailed": RunFailed,
    "EngineGone": EngineGone,
}
"""Errors that end the run, by the name under which a worker reports them."""


class Pair(NamedTuple):
    """Names the two ends between which a version of the weights travels."""

    engine: int
    name: str
    """Another one for each worker: the prefix under which both ends meet in the store."""


class Seen(NamedTuple):
    """Is what the server sees of some weights and works at a moment."""

    can_send: bool
    """Whether the weights can be sent."""
    all_have: bool
    """Whether all workers have the weights already."""
    is_delivered: bool
    """Whether all works are delivered."""


class Peer:
    """A `Peer` is what the server knows of a worker that has joined."""

    def __init__(self, wire: Wire, pair: Pair) -> None:
        self.wire, self.pair = wire, pair
        self.has_started = False
        self.can_receive = False
        """Whether it has room for another version of the weights."""
        self.sent = -1
        """The newest version that was sent to it; -1 for none."""
        self.progress = 0
        self.version: int | None = None
        """The weights of its engine; None before the first that were sent to it."""
        self.is_lost = False


class Absences:
    """Notes which engines have lost their worker and have no other one yet.

    A supervisor starts another worker at once. Where none comes, the supervisor is gone: its launcher
    ends the ranks of its own node, and those of other nodes hear nothing of it.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def begin(self, engine: int) -> None:
        self._since[engine] = time.monotonic()

    def end(self, engine: int) -> None:
        self._since.pop(engine, None)

    def check(self, limit_s: float) -> None:
        """Raise RankLost where an engine has had no worker for `limit_s`."""
        for engine, since in self._since.items():
            if (absent_s := time.monotonic() - since) > limit_s:
                raise RankLost(
                    f"rollout engine {engine} has had no worker for {absent_s:.0f} s: the rank that "
                    "leads it, or its node, is gone; the messages of that node say more"
                )


def open_store(host: str) -> tuple[dist.Store, tuple[str, int]]:
    """Return a store that listens at `host`, and its address. torch's own socket would listen on every
    interface."""
    listener = socket.create_server((host, 0), family=_family(host))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=10),
        master_listen_fd=listener.detach(),
    )
    return store, (host, port)


def never_started(engines: Iterable[int], limit_s: float) -> RunFailed:
    """Return the error for engines that have not started within their limit."""
    return RunFailed(
        f"the engines {sorted(engines)} of the rollout ranks did not start within {limit_s:g} s; see "
        "the messages of their ranks, and logs/engine_*.log in the run's folder"
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
