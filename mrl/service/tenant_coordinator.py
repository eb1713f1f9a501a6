"""Tells the workers of the rollout ranks which tenants the service has.

The module runs on the trainer's rank 0. Each tenant also has a coordinator of its own
(mrl/engine_pool/remote/coordinator.py), which the workers join as well. Prompts, samples and
weights go through the tenant's coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mrl.engine_pool.elastic.membership import Membership, WorkerState
from mrl.engine_pool.remote.connections import Peer, WorkerConnections
from mrl.engine_pool.remote.wire import MAX_MESSAGE
from mrl.errors import InputError
from mrl.service.metrics import add_up


class TenantCoordinator:
    """Sends the list of tenants to every worker, including workers that join late. Only one thread
    may call its methods."""

    def __init__(self, membership: Membership, hosts: Sequence[str]) -> None:
        """Listen for workers on an address that the machines of the rollout ranks can reach.
        `membership`: the engines of the service. `hosts`: the host names of the rollout ranks'
        machines."""
        self.hosts, self.membership = hosts, membership
        self._tenants: dict[str, dict[str, Any]] = {}
        self._times: dict[str, float] = {}
        self._connections = WorkerConnections(
            membership,
            hosts,
            on_join=self._joined,
            on_message=self._handle,
            on_loss=lambda peer, why: self._lost(peer.engine, f"its worker was lost: {why}"),
            on_failure=lambda peer, error: self._lost(peer.engine, str(error)),
        )
        self._lock = self._connections.changed
        self.address, self.token = self._connections.address, self._connections.token
        membership.owner = self
        self._connections.open()

    def wait_until_started(self, limit_s: float) -> None:
        """Wait until every engine runs. Raises RunFailed if that takes longer than `limit_s`
        seconds. If a worker reports an error, that error is raised."""
        self._connections.wait_until_started(limit_s, len(self.membership.serving()))

    def check(self) -> None:
        """Raise the error that ends the service, if there is one, for example because an engine
        cannot start."""
        self._connections.check()

    def take_times(self) -> dict[str, float]:
        """Return statistics that say how full the engines were since the last call, and whose
        requests filled them (see `GateTimes`), summed over all engines."""
        with self._lock:
            taken, self._times = self._times, {}
            return taken

    def open(self, name: str, message: dict[str, Any]) -> None:
        """Tell the workers to join the coordinator of a tenant. `message`: the address and token of
        that coordinator, the tenant's recipe, and the tenant's scheduling weight (its share of an
        engine, relative to the other tenants). Raises InputError if the message is too large."""
        message = {"type": "open", "tenant": name, **message}
        if (size := len(json.dumps(message))) > MAX_MESSAGE:
            raise InputError(
                f"the recipe has {size} bytes as JSON, expected at most {MAX_MESSAGE}, the limit of a "
                "message to workers; make its texts shorter"
            )
        with self._lock:
            self._tenants[name] = message
            self._send_to_all(message)

    def end(self, name: str) -> None:
        """Tell the workers to leave the coordinator of a tenant and to cancel their work for the
        tenant."""
        with self._lock:
            if self._tenants.pop(name, None) is not None:
                self._send_to_all({"type": "end", "tenant": name})

    def close(self) -> None:
        """Shut down the workers and wait until their engines have stopped. Harmless when repeated."""
        with self._lock:
            for number in self.membership.give_up_starting():
                self._connections.dismiss(number, at_once=True)
        self._connections.close()
        self.membership.close()

    def stop(self, number: int) -> None:
        """Shut down the worker of an engine that was removed, to which no tenant gives work any more.
        See `mrl.engine_pool.elastic.membership.Owner`."""
        with self._lock:
            self._connections.dismiss(number, at_once=False)

    def worker_state(self, number: int) -> WorkerState:
        """See `mrl.engine_pool.elastic.membership.Owner`."""
        return self._connections.state_of(number)

    def _lost(self, number: int, why: str) -> bool:
        """Record that the worker of an engine is lost, or that its engine cannot run. Return whether
        the service goes on without the engine, because it was starting or leaving."""
        if not self.membership.fail(number, why) and self.membership.admits(number):
            return False
        self._connections.dismiss(number, at_once=True)
        return True

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for peer in list(self._connections.peers.values()):
            self._connections.send(peer, message)

    def _joined(self, peer: Peer) -> None:
        for message in self._tenants.values():
            self._connections.send(peer, message)

    def _handle(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        """Let an engine serve that has started, and add the statistics that one engine's worker has
        sent to the sums over all engines."""
        if message["type"] == "started":
            self.membership.serve(peer.engine)
        elif message["type"] == "times":
            self._times = add_up([self._times, message["sums"]])
