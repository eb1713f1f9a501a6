"""Brings the workers of the rollout ranks to the server on the trainer's rank 0."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from mrl.disaggregated.server import Server
from mrl.disaggregated.supervisor import ADDRESS, OVER, PREFIX, read_hosts
from mrl.preflight.roles import Roles
from parallel.mesh import join_store


class Meeting(Protocol):
    """What a collector asks of it, on rank 0 alone."""

    is_shared: bool
    """Whether the engines are those of others, too: then nobody waits for them, and the owner of the
    collector asks for its `outlook`. The same on all ranks."""

    def hosts(self) -> list[str]:
        """Return the host of each rollout rank. Raises InputError for what one of them found wrong."""
        ...

    def invite(self, server: Server) -> None:
        """Let workers join a server."""
        ...

    def end(self) -> None:
        """Say that the server is about to close."""
        ...


class LauncherMeeting:
    """The workers of a run of its own find its server in the store of their launcher."""

    is_shared = False

    def __init__(self, roles: Roles, wait_s: float) -> None:
        """`wait_s`: how long the rollout ranks may take to come."""
        self._num_rollout, self._wait_s = roles.num_rollout, wait_s

    def hosts(self) -> list[str]:
        return read_hosts(self._store(), self._num_rollout)

    def invite(self, server: Server) -> None:
        publish_address(self._store(), server.address, server.token)

    def end(self) -> None:
        with suppress(RuntimeError):  # the launcher's store may be gone
            self._store().set(OVER, "1")

    def _store(self) -> dist.Store:
        store = dist.PrefixStore(PREFIX, join_store()[0])
        store.set_timeout(timedelta(seconds=self._wait_s))
        return store


def publish_address(store: dist.Store, address: tuple[str, int], token: str) -> None:
    """Tell the rollout ranks where they are awaited."""
    store.set(ADDRESS, json.dumps({"server": address, "token": token}))
