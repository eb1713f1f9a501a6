"""The engines to which one coordinator gives work, while engines are added and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mrl.engine_pool.elastic.membership import Membership, Use, WorkerState
from mrl.engine_pool.remote.connections import Peer, WorkerConnections
from mrl.engine_pool.remote.engine_times import EngineTimes
from mrl.engine_pool.remote.messages import Work
from mrl.engine_pool.remote.work_items import WorkItems
from mrl.run import console
from mrl.scheduling.schedule import Schedule


class EngineSet:
    """The engines of one coordinator. It implements `User` and, where the coordinator has the engines
    for itself, `Owner`.

    The coordinator's lock is held during every call of a method without another note.
    """

    def __init__(
        self,
        membership: Membership,
        connections: WorkerConnections,
        schedule: Schedule,
        items: WorkItems,
        times: EngineTimes,
        send_messages: Callable[[], None],
        *,
        is_shared: bool,
    ) -> None:
        """`send_messages` sends the messages of the schedule. `is_shared`: whether the engines are
        those of a service, to which other coordinators give work, too."""
        self._membership, self._connections, self._schedule = membership, connections, schedule
        self._items, self._times, self._send_messages = items, times, send_messages
        self._is_shared = is_shared
        self._lock = connections.changed
        self._workers = connections.peers
        self.serving: set[int] = set()
        """The engines that take part in what is assigned."""
        self._leaving: set[int] = set()
        """Engines that get no further work, and have some left."""
        self._sending: set[int] = set()
        """Engines to which weights are being sent."""

    def attach(self) -> None:
        """Begin with the engines that serve the job. Takes the lock."""
        if not self._is_shared:
            self._membership.owner = self
        numbers = self._membership.attach(self)
        with self._lock:
            for number in numbers:
                self.serve(number)

    def give_up_starting(self) -> None:
        """Give up engines that have not started yet, because the job is about to end: their workers
        would not stop before they have."""
        if not self._is_shared:
            for number in self._membership.give_up_starting():
                self._drop(number, at_once=True)

    def detach(self) -> None:
        """End the use of all engines, after their workers were shut down. Takes no lock."""
        self._membership.detach(self)
        if not self._is_shared:
            self._membership.close()

    def joined(self, number: int) -> None:
        """Record that the worker of an engine has joined."""
        self._membership.hold(number, self)

    def begin_sending(self, numbers: Iterable[int]) -> None:
        """Record that weights are being sent to these engines."""
        self._sending = set(numbers)

    def end_sending(self) -> None:
        """Record that no weights are being sent any more."""
        self._sending = set()
        for number in list(self._leaving):
            self.release_if_idle(number)

    def retire(self, number: int, *, now: bool) -> None:
        """See `mrl.engine_pool.elastic.membership.User`. An engine without weights has nothing that
        it could finish, so that others do its work in any case."""
        with self._lock:
            self.serving.discard(number)
            self._schedule.retire(number)
            if not self.serving:  # those that the service has, and this coordinator does not know
                for other in self._membership.serving():
                    self.serve(other)
            self._leaving.add(number)
            worker = self._workers.get(number)
            if now or worker is None or worker.sent < 0:
                self._drop(number, at_once=now)
                return
            worker.needs = max((work.version for work in self._items.of_engine(number)), default=-1)
            self.release_if_idle(number)
            self._lock.notify_all()

    def use_of(self, number: int) -> Use:
        """See `mrl.engine_pool.elastic.membership.User`."""
        with self._lock:
            worker = self._workers.get(number)
            num_groups = sum(work.num_wanted for work in self._items.of_engine(number))
            is_syncing = number in self._sending or self._times.activity(number) == "load"
            return Use(
                None if worker is None else worker.version,
                num_groups + self._schedule.num_leased(number),
                is_syncing,
            )

    def stop(self, number: int) -> None:
        """See `mrl.engine_pool.elastic.membership.Owner`; `_drop` has stopped it already."""

    def worker_state(self, number: int) -> WorkerState:
        """See `mrl.engine_pool.elastic.membership.Owner`."""
        return self._connections.state_of(number)

    def serve(self, number: int) -> None:
        self.serving.add(number)
        self._schedule.serve(number)
        self._times.add(number)

    def admit_loaded(self) -> None:
        """Let the engines serve that were added and have loaded weights."""
        for worker in self._workers.values():
            number = worker.engine
            if number in self.serving | self._leaving or worker.version is None:
                continue
            if self._membership.admits(number) and (
                self._is_shared or self._membership.serve(number)
            ):
                self.serve(number)
                console.note(
                    f"rollout engine {number} serves from now on, one of {len(self.serving)}; it "
                    f"has weights {worker.version}"
                )

    def release_if_idle(self, number: int) -> None:
        """Drop a leaving engine that has nothing left to do."""
        has_work = self._items.of_engine(number) or self._schedule.num_leased(number)
        if number in self._leaving and number not in self._sending and not has_work:
            self._drop(number)

    def _drop(self, number: int, *, at_once: bool = False) -> None:
        """Shut down the worker of an engine that does not serve any more, and give what it has not
        finished to others. With `at_once`, close its connection."""
        self._leaving.discard(number)
        self._connections.dismiss(number, at_once=at_once)
        for work in self._items.of_engine(number):
            self._hand_over(work)
        self._schedule.lost(number)
        self._send_messages()
        self._times.remove(number)
        self._membership.release(number, self)

    def _hand_over(self, work: Work) -> None:
        """Give a work item to an engine that serves: if possible, to one that has not been sent newer
        weights than those that the work item names."""

        def cost(number: int) -> tuple[bool, bool, int, int]:
            worker = self._workers.get(number)
            sent = -1 if worker is None else worker.sent
            return sent > work.version, sent < 0, len(self._items.of_engine(number)), number

        if not self.serving:
            return  # the coordinator is closing
        number = min(self.serving, key=cost)
        worker = self._workers.get(number)
        if worker is None or worker.sent < 0:  # it gets its work with its weights
            self._items.change(work, engine=number, version=work.version)
            return
        given = self.update(work, number, worker.sent)
        self._connections.send(worker, *given.frame())

    def move_work(self, worker: Peer, version: int) -> None:
        """Send to the new worker `worker` all work items of its engine. A work item that asks for
        weights older than `version` is first changed to use `version`."""
        for work in self._items.of_engine(worker.engine):
            given = self.update(work, worker.engine, version)
            self._connections.send(worker, *given.frame())

    def update(self, work: Work, engine: int, version: int) -> Work:
        """Give a work item to an engine that cannot generate with weights older than `version`."""
        if work.version < version:
            console.warning(
                f"rollout engine {work.engine}: weights {version} generate what weights "
                f"{work.version} were to: no more than async.max_staleness allows, but with other "
                "bits"
            )
        return self._items.change(work, engine=engine, version=max(work.version, version))

    def lost(self, number: int, why: str) -> None:
        """Record that the worker of an engine is lost that does not serve. An engine that was leaving
        is not started again. One that was starting does not come."""
        if self._is_shared and number not in self._leaving:  # its worker may join again
            self._schedule.lost(number)
            self._membership.release(number, self)
            return
        self._membership.fail(number, f"its worker was lost: {why}")
        self._drop(number)

    def failed(self, number: int, error: Exception) -> bool:
        """Handle an error that the worker of an engine has reported. Return False if it ends the
        run."""
        if number in self.serving or (self._is_shared and number not in self._leaving):
            return False
        self._membership.fail(number, str(error))
        self._drop(number)
        return True
