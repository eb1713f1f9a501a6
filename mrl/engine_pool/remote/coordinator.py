"""The coordinator: the object on the trainer's rank 0 to which workers connect.

It assigns work items (`messages.Work`) to engines and collects the delivered groups. Its schedule
decides when weights are sent. If a worker is lost, the engine's next worker gets the weights and
then carries out the work items that the lost worker did not finish.

Engines may be added and removed (mrl/engine_pool/elastic/membership.py). An engine that was added
takes part in what is assigned after it has loaded weights. What an engine that leaves cannot finish
is given to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from mrl.config.asynchronous import AsyncConfig
from mrl.engine_pool.elastic.engine_set import EngineSet
from mrl.engine_pool.elastic.membership import Membership
from mrl.engine_pool.metrics import EngineMetrics
from mrl.engine_pool.remote.connections import Pair, Peer, WorkerConnections
from mrl.engine_pool.remote.engine_times import EngineTimes
from mrl.engine_pool.remote.messages import Delivered, Work
from mrl.engine_pool.remote.rendezvous import open_store
from mrl.engine_pool.remote.work_items import WorkItems
from mrl.errors import EngineGone
from mrl.scheduling.schedule import Schedule
from mrl.scheduling.staleness import in_flight, oldest_versions
from mrl.system.heartbeat import Samples, show_samples

S = TypeVar("S", bound=Schedule)
T = TypeVar("T")


class Status(NamedTuple):
    """What the trainer can do now without waiting, as returned by `Coordinator.poll(work_ids,
    version)`. The fields refer to these two arguments."""

    can_send: bool
    """Whether a worker is ready to receive the weights `version`."""
    can_proceed: bool
    """Whether the schedule lets the trainer go on to an update to the weights `version`."""
    is_delivered: bool
    """Whether the groups of all work items in `work_ids` are delivered."""


class Coordinator(Generic[S]):
    """Assigns work items to workers and collects the delivered groups. All methods must be called
    from one thread."""

    def __init__(
        self,
        membership: Membership,
        config: AsyncConfig,
        hosts: Sequence[str],
        schedule: S,
        *,
        is_shared: bool = False,
    ) -> None:
        """Listen on an address that `hosts`, the machines of the rollout ranks, can reach.

        `membership` are the engines. `is_shared`: whether they are those of a service, to which other
        coordinators give work, too.
        """
        self._config, self._schedule = config, schedule
        self.membership = membership
        self._connections = WorkerConnections(
            self.membership,
            hosts,
            on_join=self._joined,
            on_message=self._handle,
            on_loss=self._lost,
            on_failure=lambda peer, error: self._engines.failed(peer.engine, error),
            timeout_s=config.worker_timeout_s,
        )
        self._lock = self._connections.changed
        self._workers = self._connections.peers
        self._items = WorkItems()
        self._losses: Counter[int] = Counter()
        """For each engine, how many workers were lost since one of its workers last finished a work
        item or a group."""
        self.num_lost = 0
        self._measured = EngineMetrics()
        self.times = EngineTimes(())
        self._engines = EngineSet(
            self.membership,
            self._connections,
            schedule,
            self._items,
            self.times,
            self._send_messages,
            is_shared=is_shared,
        )
        self._newest = 0
        """The newest version of the weights."""
        self.address, self.token = self._connections.address, self._connections.token
        self._store, self.store_address = open_store(self.address[0])
        """The store through which trainer ranks and workers find each other, to send weights."""
        self._engines.attach()
        self._connections.open()

    def new_id(self) -> int:
        """Return an unused work id."""
        return self._items.new_id()

    def assign(self, work: Work) -> None:
        """Give a work item to its engine's worker or, if the engine has none now, to the engine's
        next worker."""
        with self._lock:
            self._items.add(work)
            self._send(work.engine, *work.frame())

    def assign_parts(self, make: Callable[[int, int, int, int], Work | None]) -> list[int]:
        """Divide work among the engines that serve now, and return the ids of the work items.

        `make(work_id, engine, part, num_parts)` returns the work item of an engine, which has part
        `part` of `num_parts`, or None if there is nothing to do in that part. Engines that were
        added and have weights join first.
        """
        with self._lock:
            self._engines.admit_loaded()
            engines, ids = sorted(self._engines.serving), []
            for part, engine in enumerate(engines):
                work = make(self.new_id(), engine, part, len(engines))
                if work is not None:
                    self.assign(work)
                    ids.append(work.work_id)
            return ids

    def wait_until_started(self, limit_s: float) -> None:
        """Wait until as many engines have started as the schedule needs to begin.

        All engines must start within `limit_s` seconds. If one does not, this call or a later wait
        raises RunFailed.
        """
        self._connections.wait_until_started(limit_s, self._schedule.num_to_begin)

    def wait_until_free(self, version: int) -> None:
        """Wait until the schedule lets the trainer go on to an update to the weights `version`."""
        self._connections.wait(lambda: self._schedule.can_proceed(self._workers.values(), version))

    def next_update(self, version: int) -> tuple[list[Pair], list[str]]:
        """Wait until the schedule allows an update to the weights `version`, and begin the update.

        Returns (pairs of the workers that receive these weights now, names of the pairs of all
        workers). A pair identifies a worker as a receiver of weights.
        """
        self.wait_until_free(version)
        with self._lock:
            pairs = self.begin_update(version)
            return pairs, [worker.pair.name for worker in self._workers.values()]

    def begin_update(self, version: int) -> list[Pair]:
        """Tell workers that they will receive the weights `version`. Return these workers' pairs,
        which identify them as receivers of weights."""
        with self._lock:
            self._newest = version
            receivers = self._schedule.receivers(self._workers.values(), version)
            for worker in receivers:
                if worker.sent < 0:
                    self._engines.move_work(worker, version)
                worker.sent, worker.can_receive = version, False
                self._connections.send(worker, {"type": "receive", "version": version})
            pairs = [worker.pair for worker in receivers if not worker.is_lost]
            for pair in pairs:
                self._schedule.sent(pair.engine, version)
            self._engines.begin_sending(pair.engine for pair in pairs)
            return pairs

    def end_update(self, failed: Sequence[str]) -> None:
        """Record that the weights were sent. Workers whose pairs have the names `failed` count as
        lost, because weights could not be sent to them."""
        with self._lock:
            for worker in list(self._workers.values()):
                if worker.pair.name in failed:
                    self._connections.lose(worker, "weights could not be sent to it")
            self._engines.end_sending()

    def wait_for(self, work_ids: Sequence[int], version: int) -> bool:
        """Wait until all of the work items are delivered, and return True.

        Returns False as soon as a worker is ready to receive the weights `version`, if that happens
        first.
        """
        self._connections.wait(
            lambda: self._items.done.issuperset(work_ids) or self._can_send(version)
        )
        return self._items.done.issuperset(work_ids)

    def wait_until(self, take: Callable[[S], T | None], version: int) -> T | None:
        """Wait until `take(schedule)` returns a value other than None, and return the value.

        Returns None as soon as a worker is ready to receive the weights `version`, if that happens
        first. No message is handled during a call of `take`.
        """
        taken: T | None = None

        def is_over() -> bool:
            nonlocal taken
            taken = take(self._schedule)
            self._send_messages()
            return taken is not None or self._can_send(version)

        self._connections.wait(is_over)
        return taken

    def poll(self, work_ids: Sequence[int], version: int) -> Status:
        """Return, without waiting, whether the work items are delivered and the weights `version` can
        be sent. Raises the same errors as `wait_for`."""
        with self._lock:
            self._connections.check()
            can_proceed = self._schedule.can_proceed(self._workers.values(), version)
            is_delivered = self._items.done.issuperset(work_ids)
            return Status(self._can_send(version), can_proceed, is_delivered)

    def take(self, work_id: int) -> dict[int, Delivered]:
        """Return the delivered groups of a work item, and remove the item. The keys are 0 for a
        batch, and the indices of the evaluation sets for an evaluation."""
        with self._lock:
            return self._items.take(work_id)

    def peek(self, work_id: int) -> dict[int, Delivered]:
        """Return the same as `take`, without removing the work item."""
        return self._items.peek(work_id)

    def put(self, delivered: Delivered) -> int:
        """Add groups from a checkpoint as a work item that is already delivered; return its id."""
        with self._lock:
            return self._items.put(delivered)

    @contextmanager
    def paused(self) -> Iterator[S]:
        """Yield the schedule. No message of a worker is handled during the block."""
        with self._lock:
            yield self._schedule
            self._send_messages()

    def metrics(self) -> dict[str, float]:
        """Return metrics by key: the workers' measurements since the last call, the groups and
        versions in flight now, and the metrics of the schedule."""
        with self._lock:
            measured = self._measured.take().as_dict()
            loaded = [worker.version for worker in self._workers.values()]
            queue = oldest_versions(
                group for delivered in self._items.delivered() for group in delivered.groups
            )
            num_leased = sum(w.num_wanted for w in self._items.open.values() if w.kind == "batch")
            return {
                **measured,
                "rollout/num_engines": float(len(self._engines.serving)),
                **in_flight(
                    self._newest, loaded, queue + self._schedule.queued_versions(), num_leased
                ),
                "async/lost_workers": float(self.num_lost),
                **self.times.take_seconds(),
                **self._schedule.metrics(),
            }

    def close(self) -> None:
        """Shut down the workers and wait until their engines stop. A second call does nothing."""
        with self._lock:
            self._engines.give_up_starting()
        self._connections.close()
        self._engines.detach()
        self._store = None

    def _joined(self, peer: Peer) -> None:
        """Send to a new worker the name under which weights are sent to it, and the address of the
        store through which it finds the sending ranks."""
        self._engines.joined(peer.engine)
        self._schedule.joined(peer.engine)
        self._connections.send(
            peer, {"type": "welcome", "pair": peer.pair.name, "store": self.store_address}
        )

    def _lost(self, peer: Peer, why: str) -> None:
        """Record that a worker is lost. If too many workers of its engine were lost in a row, the
        run fails."""
        number = peer.engine
        if number not in self._engines.serving:
            self._engines.lost(number, why)
            return
        self.times.lose(number)
        self._schedule.lost(number)
        self._send_messages()
        self.num_lost += 1
        self._losses[number] += 1
        most = self._config.max_worker_restarts
        if self._losses[number] > most and self._connections.failure is None:
            self._connections.failure = EngineGone(
                f"the worker of rollout engine {number} was lost {self._losses[number]} times without "
                f"a finished batch between, more than async.max_worker_restarts={most}; the last time "
                f"{why}"
            )

    def _handle(self, peer: Peer, message: Mapping[str, Any], body: bytes) -> None:
        """Handle a message from a worker. Raises ValueError, KeyError or TypeError for an invalid
        message."""
        kind = message["type"]
        if kind == "pulse":
            peer.progress, peer.version = int(message["progress"]), message["version"]
            peer.samples = Samples(*map(int, message.get("samples", (0, 0))))
            counts = [worker.samples for worker in self._workers.values()]
            show_samples(sum(n.finished for n in counts), sum(n.wanted for n in counts))
            self.times.report(peer.engine, message["activity"], is_lost=peer.is_lost)
            if self._schedule.joins_at_once:
                self._engines.admit_loaded()
        elif kind == "started":
            pass
        elif kind == "free":
            peer.can_receive = True
        elif kind == "part":
            delivered = Delivered.of_frame(message, body)
            self._items.deliver(int(message["work_id"]), int(message["part"]), delivered)
        elif kind == "done":
            if self._items.finish(int(message["work_id"])):
                self._losses[peer.engine] = 0
            self._engines.release_if_idle(peer.engine)
        elif kind == "measured":
            self._measured.add_worker(EngineMetrics.from_dict(message["metrics"]))
        elif self._schedule.handle(peer.engine, message, body):
            if kind == "group":
                self._losses[peer.engine] = 0
            self._send_messages()
            self._engines.release_if_idle(peer.engine)
        else:
            raise ValueError(f"of type {kind!r}")

    def _can_send(self, version: int) -> bool:
        return bool(self._schedule.receivers(self._workers.values(), version))

    def _send_messages(self) -> None:
        """Send the schedule's messages. A message to an engine without a worker is dropped."""
        for engine, message, body in self._schedule.take_messages():
            self._send(engine, message, body)

    def _send(self, engine: int, message: Mapping[str, Any], body: bytes) -> None:
        if worker := self._workers.get(engine):
            self._connections.send(worker, message, body)
