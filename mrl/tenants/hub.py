"""The hub tells the workers of the rollout ranks which tenants there are.

It is on the trainer's rank 0. Each tenant has a server of its own beside it, which the workers join
(mrl/disaggregated/server.py): prompts, samples and weights travel there. A worker that is started anew
hears of all tenants.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mrl.disaggregated.doorway import Doorway
from mrl.disaggregated.peers import ERRORS, never_started
from mrl.disaggregated.wire import MAX_MESSAGE, Wire, WireClosed
from mrl.errors import InputError, RunFailed
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.tenants.phase_times import add_up

POLL_S = 0.2
GOODBYE_S = 30.0
"""How long workers may take to stop their engines at the end of a service."""


class Hub:
    """Keeps a connection to each worker. Its methods are for one thread."""

    def __init__(self, num_engines: int, hosts: Sequence[str]) -> None:
        """Listen where `hosts`, the machines of the rollout ranks, reach this one."""
        self.hosts = hosts
        self._num_engines = num_engines
        self._changed = threading.Condition(threading.RLock())
        self._wires: dict[int, Wire] = {}
        self._started: set[int] = set()
        self._tenants: dict[str, dict[str, Any]] = {}
        self._times: dict[str, float] = {}
        self._failure: Exception | None = None
        self._is_closed = False
        self._doorway = Doorway(hosts, self._serve)
        self.address, self.token = self._doorway.address, self._doorway.token
        self._doorway.open()

    def wait_until_started(self, limit_s: float) -> None:
        """Wait until every engine runs. Raises what a worker could not do, and RunFailed
        past the limit."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while missing := set(range(self._num_engines)) - self._started:
                self.check()
                if time.monotonic() > deadline:
                    raise never_started(missing, limit_s)
                beat()
                self._changed.wait(POLL_S)

    def check(self) -> None:
        """Raise what a worker could not do for all tenants, such as start its engine."""
        if self._failure is not None:
            raise self._failure

    def take_times(self) -> dict[str, float]:
        """Return what passed the gates of all engines since the last time: see `GateTimes`."""
        with self._changed:
            taken, self._times = self._times, {}
            return taken

    def open(self, name: str, message: dict[str, Any]) -> None:
        """Let workers join the server of a tenant, as `message` says. Raises InputError for a message
        that is too large for them."""
        message = {"type": "open", "tenant": name, **message}
        if (size := len(json.dumps(message))) > MAX_MESSAGE:
            raise InputError(
                f"the recipe has {size} bytes as JSON, expected at most {MAX_MESSAGE}, the limit of a "
                "message to workers; make its texts shorter"
            )
        with self._changed:
            self._tenants[name] = message
            self._tell(message)

    def end(self, name: str) -> None:
        """Let workers leave the server of a tenant, and give up what they do for it."""
        with self._changed:
            if self._tenants.pop(name, None) is not None:
                self._tell({"type": "end", "tenant": name})

    def close(self) -> None:
        """Send the workers home, and wait until their engines have stopped. Harmless when repeated."""
        if self._is_closed:
            return
        with self._changed:
            self._is_closed = True
            self._tell({"type": "stop"})
            wires = list(self._wires.values())
        self._doorway.close()
        deadline = time.monotonic() + GOODBYE_S
        for wire in wires:
            while not wire.is_closed and time.monotonic() < deadline:
                time.sleep(0.05)
            wire.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for wire in self._wires.values():
            with suppress(WireClosed):  # its thread finds out
                wire.send(message)

    def _serve(self, wire: Wire, hello: dict[str, Any]) -> None:
        """Read what one worker says until it leaves."""
        number = hello.get("engine")
        if self._is_closed or not isinstance(number, int) or not 0 <= number < self._num_engines:
            wire.close()
            return
        try:
            with self._changed:
                if (former := self._wires.pop(number, None)) is not None:
                    former.close()
                self._wires[number] = wire
                for message in self._tenants.values():
                    wire.send(message)
            while True:
                message, _ = wire.receive()
                with self._changed:
                    self._heed(number, message)
                    self._changed.notify_all()
        except WireClosed:
            pass
        except (
            Exception
        ) as error:  # caused by its message: another worker of this engine may succeed
            why = " ".join(f"{type(error).__name__}: {error}".split())
            console.warning(f"rollout engine {number}: its worker is let go, {why}")
        finally:
            wire.close()  # otherwise the worker would wait for ever

    def _heed(self, number: int, message: dict[str, Any]) -> None:
        """Handle a message of an engine's worker. Raises for an invalid message."""
        if message["type"] == "started":
            self._started.add(number)
        elif message["type"] == "failed":
            text = f"rollout engine {number}: {message['text']}"
            self._failure = ERRORS.get(str(message["error"]), RunFailed)(text)
        elif message["type"] == "times":
            self._times = add_up([self._times, message["sums"]])
