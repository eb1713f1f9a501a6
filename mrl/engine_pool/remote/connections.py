"""Keeps the trainer's connections to the workers of the rollout ranks.

Each engine has a number and at most one worker at a time. A worker that dies or sends nothing for
too long counts as lost. Its supervisor then starts another worker, which joins with the same engine
number. Each worker's messages are read and handled in a thread of their own, while the trainer's
thread waits for the results.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mrl.engine_pool.elastic.membership import Membership, WorkerState
from mrl.engine_pool.remote.listener import AuthenticatedListener
from mrl.engine_pool.remote.messages import reported_error
from mrl.engine_pool.remote.wire import RANK, Wire, WireClosed
from mrl.errors import RankLost, RunFailed
from mrl.run import console
from mrl.system.heartbeat import Samples, beat

POLL_S = 0.5
ABSENT_S = 600.0
"""Seconds that an engine may be without a worker before the run fails."""
GOODBYE_S = 30.0
"""Seconds that workers may take to stop their engines at the end of a run."""


class Pair(NamedTuple):
    """Identifies one worker as a receiver of weights."""

    engine: int
    """The number of the worker's engine."""
    name: str
    """Unique to the worker. It is the prefix of the store keys through which the trainer and the
    worker find each other."""


class Peer:
    """What the trainer knows about a worker that has joined."""

    def __init__(self, wire: Wire, pair: Pair) -> None:
        self.wire, self.pair, self.engine = wire, pair, pair.engine
        self.can_receive = False
        """Whether the worker has room for another version of the weights."""
        self.sent = -1
        """The newest version of the weights that was sent to the worker; -1 for none."""
        self.version: int | None = None
        """The version that the worker's engine has loaded; None before its first version."""
        self.needs = -1
        """If the engine is leaving, the newest version of the weights that its work needs; otherwise
        -1."""
        self.progress = 0
        """A number that grows while the worker makes progress."""
        self.has_started = False
        """Whether the worker's engine has started."""
        self.samples = Samples()
        """The worker's numbers of samples."""
        self.is_lost = False


class WorkerConnections:
    """Keeps the connection to the worker of each engine."""

    def __init__(
        self,
        membership: Membership,
        hosts: Sequence[str],
        *,
        on_join: Callable[[Peer], None],
        on_message: Callable[[Peer, dict[str, Any], bytes], None],
        on_loss: Callable[[Peer, str], object],
        on_failure: Callable[[Peer, Exception], bool],
        timeout_s: float = math.inf,
    ) -> None:
        """Listen on an address that `hosts`, the machines of the rollout ranks, can reach. Workers
        of the engines of `membership` may join.

        The callbacks are called with the lock `changed` held. If `on_message` raises RunFailed, the
        run ends; after any other exception the worker counts as lost. The second argument of
        `on_loss` is the reason for the loss. `on_failure` is called with an error that a worker has
        reported; if it returns False, the error ends the run. A worker that sends nothing for
        `timeout_s` seconds counts as lost.
        """
        self._membership, self._timeout_s = membership, timeout_s
        self._on_join, self._on_message, self._on_loss = on_join, on_message, on_loss
        self._on_failure = on_failure
        self.changed = threading.Condition(threading.RLock())
        self.peers: dict[int, Peer] = {}
        """The worker of each engine that has one, by the engine's number."""
        self.failure: Exception | None = None
        """The error that ends the run; None while there is none."""
        self._expected = set(membership.serving())
        """Numbers of the engines that must start, less those that were removed."""
        self._missing = set(self._expected)
        """Numbers of the expected engines that have not started yet. An engine whose worker is lost
        is added again, but only until `wait_until_started` has returned."""
        self._has_begun = False
        self._start_limit_s, self._start_deadline = math.inf, math.inf
        self._absent_since: dict[int, float] = {}
        """For each engine that has lost its worker and has no new one yet, the time of the loss on
        the clock of `time.monotonic`."""
        self._num_joined = 0
        self._is_closed = False
        self._listener = AuthenticatedListener(hosts, self._serve)
        self.address, self.token = self._listener.address, self._listener.token

    def open(self) -> None:
        """Begin to accept workers."""
        self._listener.open()

    def wait_until_started(self, limit_s: float, num_needed: int) -> None:
        """Wait until `num_needed` engines have started, or all of them if there are fewer.

        All engines must start within `limit_s` seconds. If one does not, this call or a later
        `check` raises RunFailed.
        """
        self._start_limit_s, self._start_deadline = limit_s, time.monotonic() + limit_s

        def has_started() -> bool:
            beat()  # `limit_s` limits this wait, not the watchdog
            needed = min(num_needed, len(self._expected))
            return len(self._expected) - len(self._missing) >= needed

        self.wait(has_started)
        self._has_begun = True

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true. It is evaluated after each message of a worker, and
        every POLL_S seconds. Raises as `check` does."""
        progress = -1
        with self.changed:
            while True:
                self.check()
                if condition():
                    return
                if (now := sum(peer.progress for peer in self.peers.values())) != progress:
                    progress = now
                    beat()
                self.changed.wait(POLL_S)

    def check(self) -> None:
        """Drop workers that have sent nothing for too long.

        Raises `failure` if it is set, and RunFailed if engines did not start in time."""
        with self.changed:
            self._lose_silent()
            self._check_absent()
            if self.failure is not None:
                raise self.failure
            if self._missing and time.monotonic() > self._start_deadline:
                raise RunFailed(
                    f"the engines {sorted(self._missing)} of the rollout ranks did not start within "
                    f"{self._start_limit_s:g} s; see the messages of their ranks, and "
                    "logs/engine_*.log in the run's folder"
                )

    def send(self, peer: Peer, message: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message to a worker. If this fails, the worker counts as lost."""
        try:
            peer.wire.send(message, body)
        except WireClosed as error:
            self.lose(peer, str(error))

    def lose(self, peer: Peer, why: str) -> None:
        """Close the connection to a worker and forget the worker. Its supervisor may start another
        one."""
        if peer.is_lost or self._is_closed:
            return
        peer.is_lost = True
        peer.wire.close()
        console.warning(f"rollout engine {peer.engine}: its worker is lost: {why}")
        del self.peers[peer.engine]
        self._absent_since[peer.engine] = time.monotonic()
        if not self._has_begun and peer.engine in self._expected:
            self._missing.add(peer.engine)
        self._on_loss(peer, why)
        self.changed.notify_all()

    def dismiss(self, engine: int, *, at_once: bool) -> None:
        """Forget an engine and shut down its worker, if it has one, without counting a loss. With
        `at_once`, close the connection instead of telling the worker to stop."""
        for known in (self._expected, self._missing):
            known.discard(engine)
        self._absent_since.pop(engine, None)
        if (peer := self.peers.pop(engine, None)) is not None:
            peer.is_lost = True
            if at_once:
                peer.wire.close()
            else:
                with suppress(WireClosed):
                    peer.wire.send({"type": "stop"})
        self.changed.notify_all()

    def state_of(self, engine: int) -> WorkerState:
        """Return whether the worker of an engine is present."""
        with self.changed:
            peer = self.peers.get(engine)
            if peer is not None and peer.has_started:
                return "present"
            return "lost" if engine in self._absent_since else "starting"

    def close(self) -> None:
        """Shut down the workers and wait until their engines stop. A second call does nothing."""
        if self._is_closed:
            return
        with self.changed:
            self._is_closed = True
            peers = list(self.peers.values())
            for peer in peers:
                with suppress(WireClosed):
                    peer.wire.send({"type": "stop"})
        self._listener.close()
        deadline = time.monotonic() + GOODBYE_S
        for peer in peers:
            while not peer.wire.is_closed and time.monotonic() < deadline:
                time.sleep(0.05)
            peer.wire.close()

    def _lose_silent(self) -> None:
        for peer in list(self.peers.values()):
            silent_s = time.monotonic() - peer.wire.heard
            # Messages may have arrived while this process was stopped or busy; they are read first.
            if silent_s > self._timeout_s and not peer.wire.has_unread:
                self.lose(peer, f"it gave no sign for {silent_s:.0f} s")

    def _check_absent(self) -> None:
        """Raise RankLost if an engine has had no worker for more than ABSENT_S seconds.

        A supervisor starts another worker at once, so if no worker joins, the supervisor is gone,
        too. The trainer would not learn of this otherwise, because a launcher ends only the ranks
        of its own node.
        """
        for engine, since in self._absent_since.items():
            if (absent_s := time.monotonic() - since) > ABSENT_S:
                raise RankLost(
                    f"rollout engine {engine} has had no worker for {absent_s:.0f} s: the rank that "
                    "leads it, or its node, is gone; the messages of that node say more"
                )

    def _serve(self, wire: Wire, hello: dict[str, Any]) -> None:
        """Read the messages of one worker until its connection ends."""
        peer, why = None, ""
        try:
            if hello.get("type") == RANK:
                self._membership.serve_rank(wire, hello)
                return
            peer = self._join(wire, hello)
            while peer is not None:
                message, body = wire.receive()
                with self.changed:
                    self._handle(peer, message, body)
                    self.changed.notify_all()
        except WireClosed as error:
            why = str(error)
        except RunFailed as error:
            self.failure, why = error, str(error)
        except Exception as error:  # the thread must end in `lose` whatever happens
            text = " ".join(f"{type(error).__name__}: {error}".split())
            why = f"its message could not be read: {text}"
        wire.close()
        if peer is not None:
            with self.changed:
                self.lose(peer, why)

    def _join(self, wire: Wire, hello: dict[str, Any]) -> Peer | None:
        """Return the worker that `hello` introduces; None if its engine number is invalid or the
        connections are closed."""
        number = hello.get("engine")
        if self._is_closed or not isinstance(number, int):
            return None
        with self.changed:
            if not self._membership.admits(number):
                return None
            if (former := self.peers.get(number)) is not None:
                self.lose(former, "another one took its place")
            self._num_joined += 1
            peer = Peer(wire, Pair(number, f"pair_{number}_{self._num_joined}"))
            self.peers[number] = peer
            self._absent_since.pop(number, None)
            self._on_join(peer)
        return peer

    def _handle(self, peer: Peer, message: dict[str, Any], body: bytes) -> None:
        if message["type"] == "started":
            peer.can_receive = peer.has_started = True
            self._missing.discard(peer.engine)
            self._on_message(peer, message, body)
        elif message["type"] == "dies":
            raise WireClosed(str(message["text"]))
        elif message["type"] == "failed":
            error = reported_error(message, peer.engine)
            if not self._on_failure(peer, error):
                self.failure = error
        else:
            self._on_message(peer, message, body)
