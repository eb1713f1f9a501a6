"""This module is the trainer's side of a disaggregated run: a server on rank 0 that workers join.

Each engine has a number and at most one worker at a time. A worker that dies or falls silent is lost:
its supervisor starts another one, which joins under the same number, gets the weights, and does what is
left of the engine's work. Threads read what workers say; the trainer's thread waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mrl.config.asynchronous import AsyncConfig
from mrl.disaggregated.doorway import Doorway
from mrl.disaggregated.engine_times import EngineTimes
from mrl.disaggregated.measures import MEASURED, add_worker, in_flight, oldest_versions
from mrl.disaggregated.peers import ERRORS, Absences, Pair, Peer, Seen, never_started, open_store
from mrl.disaggregated.wire import Wire, WireClosed
from mrl.disaggregated.work import Delivered, Result, Work
from mrl.errors import EngineGone, RunFailed
from mrl.run import console
from mrl.system.heartbeat import beat

POLL_S = 0.5
ABSENT_S = 600.0
"""How long an engine may have no worker."""
GOODBYE_S = 30.0
"""How long workers may take to stop their engines at the end of a run."""


class Server:
    """Gives work to the workers and collects what they deliver. All methods are for one thread."""

    def __init__(self, num_engines: int, config: AsyncConfig, hosts: Sequence[str]) -> None:
        """Listen where `hosts`, the machines of the rollout ranks, reach this one."""
        self._config, self._num_engines = config, num_engines
        self._changed = threading.Condition(threading.RLock())
        self._workers: dict[int, Peer] = {}
        self._num_joined = 0
        self._work: dict[int, Work] = {}
        """What is not delivered, by its id, in the order in which it was assigned."""
        self._results: dict[int, Result] = {}
        self._done: set[int] = set()
        self._losses: Counter[int] = Counter()
        """Workers of an engine that were lost since it last delivered."""
        self.num_lost = 0
        self._absences = Absences()
        self._failure: Exception | None = None
        self._is_closed = False
        self._next_id = 0
        self._measured: dict[str, float] = {}
        self.times = EngineTimes(num_engines)
        self._newest = 0  # weights of the trainer
        self._doorway = Doorway(hosts, self._serve)
        self.address, self.token = self._doorway.address, self._doorway.token
        self._store, self.store_address = open_store(self.address[0])
        """The store in which pairs meet, which a late worker can reach, too."""
        self._doorway.open()

    def new_id(self) -> int:
        """Return the id of another work."""
        self._next_id += 1
        return self._next_id

    def assign(self, work: Work) -> None:
        """Give a work to its engine, now or when a worker joins."""
        with self._changed:
            self._work[work.work_id] = work
            self._results[work.work_id] = Result()
            if worker := self._workers.get(work.engine):
                self._tell(worker, *work.frame())

    def wait_until_started(self, limit_s: float) -> None:
        """Wait until every engine has a worker that is ready. Raises RunFailed past the limit."""
        deadline = time.monotonic() + limit_s

        def ready() -> bool:
            started = [n for n, worker in self._workers.items() if worker.has_started]
            if time.monotonic() > deadline:
                raise never_started(set(range(self._num_engines)) - set(started), limit_s)
            return len(started) == self._num_engines

        self._wait(ready)

    def wait_until_free(self, version: int) -> None:
        """Wait until every worker has room for the weights `version`, or has them."""
        self._wait(lambda: bool(self._takers(version)) or self._all_have(version))

    def next_update(self, version: int) -> tuple[list[Pair], list[str]]:
        """Return the pairs to which the weights `version` are to be sent, once there is room for them,
        and the names of all pairs whose workers are there."""
        self.wait_until_free(version)
        with self._changed:
            pairs = self.begin_update(version)
            return pairs, [worker.pair.name for worker in self._workers.values()]

    def begin_update(self, version: int) -> list[Pair]:
        """Tell the workers that lack the weights `version` to receive them; return their pairs.

        Work for weights that a new worker never had goes to `version`.
        """
        with self._changed:
            self._newest = version
            takers = self._takers(version)
            for worker in takers:
                if worker.sent < 0:
                    self._move_work(worker, version)
                worker.sent, worker.can_receive = version, False
                self._tell(worker, {"type": "receive", "version": version})
            return [worker.pair for worker in takers if not worker.is_lost]

    def lose_pairs(self, names: Sequence[str]) -> None:
        """Lose the workers to which weights could not be sent."""
        with self._changed:
            for worker in list(self._workers.values()):
                if worker.pair.name in names:
                    self._lose(worker, "weights could not be sent to it")

    def _move_work(self, worker: Peer, version: int) -> None:
        """Give a new worker what its engine has left to do, by weights that it can still get."""
        engine = worker.pair.engine
        for work_id, work in list(self._work.items()):
            if work.engine != engine:
                continue
            if work.version < version:
                console.warning(
                    f"rollout engine {engine}: weights {version} generate what weights {work.version} "
                    "were to: no more than async.max_staleness allows, but with other bits"
                )
                self._work[work_id] = work.by(version)
            self._tell(worker, *self._work[work_id].frame())

    def _takers(self, version: int) -> list[Peer]:
        """Return the workers that lack a version: none of them before all of them can receive it."""
        lacking = [w for w in self._workers.values() if w.sent < version]
        joined = len(self._workers) == self._num_engines
        return lacking if joined and all(w.can_receive for w in lacking) else []

    def _all_have(self, version: int) -> bool:
        joined = len(self._workers) == self._num_engines
        return joined and all(worker.sent >= version for worker in self._workers.values())

    def wait_for(self, work_ids: Sequence[int], version: int) -> bool:
        """Wait until all of the works are delivered; return False where a worker lacks the weights
        `version` before that."""

        def over() -> bool:
            return self._done.issuperset(work_ids) or bool(self._takers(version))

        self._wait(over)
        return self._done.issuperset(work_ids)

    def look(self, work_ids: Sequence[int], version: int) -> Seen:
        """Return what there is now, without a wait. Raises what a wait would raise."""
        with self._changed:
            self._check()
            can_send, is_delivered = bool(self._takers(version)), self._done.issuperset(work_ids)
            return Seen(can_send, self._all_have(version), is_delivered)

    def take(self, work_id: int) -> Result:
        """Return what was delivered for a work, and forget it."""
        with self._changed:
            self._done.remove(work_id)
            return self._results.pop(work_id)

    def peek(self, work_id: int) -> Result:
        """Return what was delivered for a work."""
        return self._results[work_id]

    def put(self, delivered: Delivered) -> int:
        """Take in what was delivered before a resume; return the id of its work."""
        work_id = self.new_id()
        with self._changed:
            self._results[work_id] = Result({0: delivered})
            self._done.add(work_id)
        return work_id

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is asked again whenever a worker has said something."""
        progress = -1
        with self._changed:
            while True:
                self._check()
                if condition():
                    return
                if (now := sum(worker.progress for worker in self._workers.values())) != progress:
                    progress = now
                    beat()
                self._changed.wait(POLL_S)

    def _check(self) -> None:
        """Raise what has gone wrong with the workers."""
        self._find_silent()
        self._absences.check(ABSENT_S)
        if self._failure is not None:
            raise self._failure

    def _find_silent(self) -> None:
        for worker in list(self._workers.values()):
            silent_s = time.monotonic() - worker.wire.heard
            # Read what arrived while this process was stopped or busy before a worker counts as lost.
            if silent_s > self._config.worker_timeout_s and not worker.wire.has_unread:
                self._lose(worker, f"it gave no sign for {silent_s:.0f} s")

    def _lose(self, worker: Peer, why: str) -> None:
        """Forget a worker; another one may join in its place."""
        if worker.is_lost or self._is_closed:
            return
        worker.is_lost = True
        worker.wire.close()
        number = worker.pair.engine
        console.warning(f"rollout engine {number}: its worker is lost: {why}")
        if self._workers.get(number) is worker:
            del self._workers[number]
            self._absences.begin(number)
            self.times.lose(number)
            self._on_loss(number)
        self.num_lost += 1
        self._losses[number] += 1
        if self._losses[number] > self._config.max_worker_restarts and self._failure is None:
            self._failure = EngineGone(
                f"the worker of rollout engine {number} was lost {self._losses[number]} times without "
                f"a finished batch between, more than async.max_worker_restarts="
                f"{self._config.max_worker_restarts}; the last time {why}"
            )
        self._changed.notify_all()

    def _tell(self, worker: Peer, message: dict[str, Any], body: bytes = b"") -> None:
        try:
            worker.wire.send(message, body)
        except WireClosed as error:
            self._lose(worker, str(error))

    def _serve(self, wire: Wire, hello: dict[str, Any]) -> None:
        """Read what one worker says until it leaves."""
        worker = None
        try:
            worker = self._join(wire, hello)
            while worker is not None:
                message, body = wire.receive()
                with self._changed:
                    self._heed(worker, message, body)
                    self._changed.notify_all()
        except WireClosed as error:
            why = str(error)
        except RunFailed as error:
            self._failure, why = error, str(error)
        except Exception as error:  # this thread is the only one that listens to the worker
            why = f"its message could not be read: {type(error).__name__}: {error}"
        else:
            why = ""
        wire.close()
        if worker is not None:
            with self._changed:
                self._lose(worker, why)

    def _join(self, wire: Wire, hello: dict[str, Any]) -> Peer | None:
        """Return the worker behind a connection; None for one that has no place here."""
        number = hello.get("engine")
        if self._is_closed or not isinstance(number, int) or not 0 <= number < self._num_engines:
            return None
        with self._changed:
            if (former := self._workers.get(number)) is not None:
                self._lose(former, "another one took its place")
            self._num_joined += 1
            worker = Peer(wire, Pair(number, f"pair_{number}_{self._num_joined}"))
            self._workers[number] = worker
            self._absences.end(number)
            self._on_join(number, self._num_joined)
            self._tell(
                worker, {"type": "welcome", "pair": worker.pair.name, "store": self.store_address}
            )
        return worker

    def _heed(self, worker: Peer, message: dict[str, Any], body: bytes) -> None:
        kind = message["type"]
        if kind == "pulse":
            worker.progress, worker.version = int(message["progress"]), message["version"]
            self.times.report(worker.pair.engine, message["activity"], is_lost=worker.is_lost)
        elif kind == "started":
            worker.has_started = worker.can_receive = True
        elif kind == "free":
            worker.can_receive = True
        elif kind == "part":
            if (result := self._results.get(int(message["work_id"]))) is not None:
                result.parts[int(message["part"])] = Delivered.of_frame(message, body)
        elif kind == "done":
            self._finish(worker, int(message["work_id"]))
        elif kind == "measured":
            add_worker(self._measured, message["metrics"])
        elif kind == "failed":
            text = f"rollout engine {worker.pair.engine}: {message['text']}"
            self._failure = ERRORS.get(message["error"], RunFailed)(text)
        elif not self._on_message(worker, message, body):
            raise ValueError(f"of type {kind!r}")

    def _on_message(self, worker: Peer, message: dict[str, Any], body: bytes) -> bool:
        """Heed a message of another type; return whether it is known."""
        return False

    def _on_join(self, engine: int, incarnation: int) -> None:
        """Take note of a worker that has joined."""

    def _on_loss(self, engine: int) -> None:
        """Take note of a worker that is lost."""

    def metrics(self) -> dict[str, float]:
        """Return what workers have measured since the last call, and what is in flight now."""
        with self._changed:
            found, self._measured = dict.fromkeys(MEASURED, 0.0) | self._measured, {}
            loaded = [peer.version for peer in self._workers.values()]
            flying = in_flight(self._newest, loaded, self._queued(), self._work.values())
            lost = {"async/lost_workers": float(self.num_lost)}
            return found | flying | lost | self.times.take_seconds()

    def _queued(self) -> list[int]:
        """Return the version of the oldest token of each group that is finished and not trained."""
        done = (part for work_id in self._done for part in self._results[work_id].parts.values())
        return oldest_versions(group for delivered in done for group in delivered.groups)

    def _finish(self, worker: Peer, work_id: int) -> None:
        if self._work.pop(work_id, None) is not None:
            self._done.add(work_id)
            self._losses[worker.pair.engine] = 0

    def close(self) -> None:
        """Send the workers home and wait until their engines have stopped. Harmless when repeated."""
        if self._is_closed:
            return
        with self._changed:
            self._is_closed = True
            workers = list(self._workers.values())
            for worker in workers:
                with suppress(WireClosed):
                    worker.wire.send({"type": "stop"})
        self._doorway.close()
        deadline = time.monotonic() + GOODBYE_S
        for worker in workers:
            while not worker.wire.is_closed and time.monotonic() < deadline:
                time.sleep(0.05)
            worker.wire.close()
        self._store = None
