"""Tells workers the coordinator's address, through the launcher's store.

The module also opens the store through which trainer ranks and workers find each other, to send
weights.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.remote.supervisor import ADDRESS, OVER, PREFIX, read_hosts
from parallel.mesh import join_store

Address = tuple[str, int]


@dataclass(frozen=True)
class Rendezvous:
    """How the workers of a run find its coordinator. Only rank 0 calls the functions."""

    hosts: Callable[[], Sequence[str]]
    """Returns the name of the host of each rollout rank. Raises InputError if a rollout rank has
    reported an error in the recipe."""
    invite: Callable[[Address, str], None]
    """Tells workers the address of the coordinator and the token with which to join."""
    end: Callable[[], None]
    """Announces that the coordinator is about to close."""
    membership: Membership | None = None
    """The engines of the service on rank 0; None for a run, which has engines of its own."""
    is_shared: bool = False
    """Whether several tenants share the engines. In that case, no rank waits for an engine, and the
    service calls `RemotePool.next_action`. The value is the same on all ranks."""


def launcher_rendezvous(num_rollout: int, wait_s: float) -> Rendezvous:
    """Return the rendezvous for the rollout ranks that this launcher has started, through its
    store.

    `wait_s`: seconds that the rollout ranks may take to start.
    """

    def open_launcher_store() -> dist.Store:
        store = dist.PrefixStore(PREFIX, join_store()[0])
        store.set_timeout(timedelta(seconds=wait_s))
        return store

    def end() -> None:
        with suppress(RuntimeError):  # the launcher's store may be gone
            open_launcher_store().set(OVER, "1")

    return Rendezvous(
        hosts=lambda: read_hosts(open_launcher_store(), num_rollout),
        invite=lambda address, token: publish_address(open_launcher_store(), address, token),
        end=end,
    )


def publish_address(store: dist.Store, address: Address, token: str) -> None:
    """Write the coordinator's address and token to the store, where the rollout ranks read them."""
    store.set(ADDRESS, json.dumps({"server": address, "token": token}))


def open_store(host: str) -> tuple[dist.Store, Address]:
    """Return a store that listens only on the address `host`, and the store's (host, port).

    The socket is made here, because a socket made by torch would listen on every interface.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
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
