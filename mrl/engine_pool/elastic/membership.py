"""Keeps the list of a job's engines, on rank 0. Engines may be added and removed at any time.

An engine that is added is `starting` until it has weights that were checked. It is `serving` from
then on, and takes part in what is given out next. An engine that is removed is `leaving`: it gets no
further prompts, finishes what it has, and stops. Each coordinator (remote/coordinator.py) keeps its
own list of the engines to which it gives work. In a run there is one coordinator, in a service one
for each tenant.

The lock of a `Membership` is taken last: no coordinator is called while it is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from mrl.engine_pool.elastic.places import HostRank, Place, choose_places
from mrl.engine_pool.remote.wire import Wire, WireClosed
from mrl.errors import InputError
from mrl.run import console

State = Literal["starting", "serving", "leaving", "left", "failed"]
MAX_ADDED = 64
"""Maximum number of engines that one command may add."""
MAX_ENDED = 200
"""How many engines that have left, or could not start, are remembered."""
WorkerState = Literal["starting", "lost", "present"]


class NoEngine(InputError):
    """The job has no engine with this number."""


class Use(NamedTuple):
    """What one coordinator knows about an engine."""

    version: int | None = None
    """The version of the weights in the engine; None if it has none."""
    num_groups: int = 0
    """The number of sample groups that the engine still has to generate."""
    is_syncing: bool = False
    """Whether the engine is receiving or loading weights."""


class User(Protocol):
    """A coordinator, which gives work to engines."""

    def retire(self, number: int, *, now: bool) -> None:
        """Give no further work to an engine. It finishes what it has, or, with `now`, others do. When
        nothing is left, the coordinator calls `Membership.release`."""
        ...

    def use_of(self, number: int) -> Use:
        """Return what the coordinator knows about an engine."""
        ...


class Owner(Protocol):
    """Has the connections to the processes of the engines' workers."""

    def stop(self, number: int) -> None:
        """Stop the worker of an engine to which no coordinator gives work any more."""
        ...

    def worker_state(self, number: int) -> WorkerState:
        """Return whether the worker of an engine is there."""
        ...


@dataclass
class _Engine:
    number: int
    place: Place | None
    """None until the rank that leads the engine has connected."""
    state: State
    since: float = field(default_factory=time.time)
    """When the engine came into its state, in seconds since 1970."""
    why: str = ""
    """Why the engine could not start."""
    users: set[int] = field(default_factory=set)
    """The coordinators (by `id`) that may still have work for the engine."""


class Membership:
    """The engines of a job. Any thread may call the methods."""

    def __init__(self, num_engines: int, gpus_per_engine: int = 1) -> None:
        """`num_engines` engines, with the numbers from 0, are those with which the job starts.
        `gpus_per_engine` is the number of GPUs of an engine on GPUs."""
        self._lock = threading.Lock()
        self._engines = {n: _Engine(n, None, "serving") for n in range(num_engines)}
        self._ended: list[_Engine] = []
        self._next, self._num_gpus = num_engines, gpus_per_engine
        self._ranks: dict[int, tuple[HostRank, Wire]] = {}
        """The rollout ranks that can start engines, by the number of the engine that they lead from
        the start."""
        self._users: list[User] = []
        self.owner: Owner | None = None

    # Coordinators

    def attach(self, user: User) -> list[int]:
        """Add a coordinator. Return the engines that serve, to which it may give work."""
        with self._lock:
            self._users.append(user)
            serving = self._in_state("serving")
            for each in serving:
                each.users.add(id(user))
            return [each.number for each in serving]

    def detach(self, user: User) -> None:
        """Remove a coordinator, which is about to close. Harmless when repeated."""
        with self._lock:
            self._users = [each for each in self._users if each is not user]
            numbers = list(self._engines)
        for number in numbers:
            self.release(number, user)

    def hold(self, number: int, user: User) -> None:
        """Record that a coordinator may give work to an engine, because its worker has joined."""
        with self._lock:
            if number in self._engines:
                self._engines[number].users.add(id(user))

    def release(self, number: int, user: User) -> None:
        """Record that a coordinator has no work for an engine any more. A leaving engine that nobody
        needs is stopped."""
        with self._lock:
            engine = self._engines.get(number)
            if engine is None:
                return
            engine.users.discard(id(user))
            is_free = engine.state == "leaving" and not engine.users
        if is_free and self.owner is not None:
            self.owner.stop(number)

    def serving(self) -> list[int]:
        """Return the numbers of the engines that serve."""
        with self._lock:
            return [each.number for each in self._in_state("serving")]

    def admits(self, number: int) -> bool:
        """Return whether a worker of this engine may join."""
        with self._lock:
            engine = self._engines.get(number)
            return engine is not None and engine.state in ("starting", "serving")

    def serve(self, number: int) -> bool:
        """Record that a starting engine serves from now on. Return whether the engine serves."""
        with self._lock:
            engine = self._engines.get(number)
            if engine is not None and engine.state == "starting":
                self._set_state(engine, "serving")
            return engine is not None and engine.state == "serving"

    def fail(self, number: int, why: str) -> bool:
        """Record that a starting engine cannot start, and end its process. Return False, without any
        change, if the engine is not starting: then its loss concerns the job."""
        with self._lock:
            engine = self._engines.get(number)
            if engine is None or engine.state != "starting":
                return False
            self._end(engine, "failed", why)
        self._tell(engine, "leave", "kill")
        console.warning(f"rollout engine {number} could not be added: {why}")
        return True

    # Rollout ranks

    def serve_rank(self, wire: Wire, hello: dict[str, Any]) -> None:
        """Handle the messages of a rollout rank that can start engines, until its connection ends.
        `hello` is its first message."""
        own = Place(int(hello["engine"]), str(hello["host"]), tuple(map(str, hello["gpus"])))
        with self._lock:
            rank = HostRank(own, tuple(map(str, hello["rank_gpus"])))
            self._ranks[own.rank] = rank, wire
            if (engine := self._engines.get(own.rank)) is not None and engine.place is None:
                engine.place = own
        try:
            while True:
                message, _ = wire.receive()
                if message.get("type") == "ended":
                    self._worker_ended(int(message["engine"]), str(message["why"]))
        except WireClosed:
            with self._lock:
                self._ranks.pop(own.rank, None)
                lost = [
                    e.number
                    for e in self._in_state("starting")
                    if e.place and e.place.rank == own.rank
                ]
            for number in lost:
                self.fail(number, f"the rollout rank on {own.host} that starts it is gone")

    def _worker_ended(self, number: int, why: str) -> None:
        """Record that a rollout rank has ended its work for an engine."""
        if self.fail(number, why):
            return
        with self._lock:
            engine = self._engines.get(number)
            if engine is not None and engine.state == "leaving":
                self._end(engine, "left", "")

    def give_up_starting(self) -> list[int]:
        """End the processes of engines that are still starting, because the job is about to end.
        Return their numbers."""
        with self._lock:
            numbers = [each.number for each in self._in_state("starting")]
        return [number for number in numbers if self.fail(number, "the job is over")]

    def close(self) -> None:
        """Tell the rollout ranks that the job is over."""
        with self._lock:
            wires = [wire for _, wire in self._ranks.values()]
        for wire in wires:
            with suppress(WireClosed):
                wire.send({"type": "over"})

    # Commands

    def add(self, count: int = 1, host: str | None = None, gpus: Sequence[str] = ()) -> list[int]:
        """Start `count` engines beside those of the job. Return their numbers. Raises InputError if
        there is no room for them."""
        if not 1 <= count <= MAX_ADDED:
            raise InputError(f"--count: got {count}, expected 1 to {MAX_ADDED}")
        with self._lock:
            if not self._ranks:
                raise InputError("no rollout rank of this job has connected yet; try again later")
            ranks = [rank for rank, _ in self._ranks.values()]
            used = [each.place for each in self._engines.values() if each.place is not None]
            places = choose_places(ranks, used, count, self._num_gpus, host, gpus)
            added = [_Engine(self._next + i, place, "starting") for i, place in enumerate(places)]
            self._next += count
            self._engines |= {each.number: each for each in added}
        for engine in added:
            if not self._tell(engine, "start"):
                self.fail(engine.number, "the rollout rank that starts it is gone")
        return [each.number for each in added]

    def remove(self, number: int, *, now: bool = False) -> None:
        """Remove an engine once it has finished its work. With `now`, other engines do that work, and
        the engine is killed. An engine that is still starting is killed in any case.

        Raises NoEngine, and InputError if no other engine serves.
        """
        with self._lock:
            engine = self._engines.get(number)
            if engine is None:
                known = ", ".join(map(str, self._engines))
                raise NoEngine(f"there is no engine {number}; the job has {known}")
            if engine.state == "serving" and len(self._in_state("serving")) == 1:
                raise InputError(
                    f"engine {number} is the last one that serves; add another one first, and wait "
                    "until it serves"
                )
            if engine.place is None:
                raise InputError(
                    f"the rank of engine {number} has not connected yet; try again later"
                )
            now = now or engine.state == "starting"
            if engine.state != "leaving":
                self._set_state(engine, "leaving")
            users = list(self._users)
        self._tell(engine, "leave")
        for user in users:
            user.retire(number, now=now)
        with self._lock:
            is_free = number in self._engines and not engine.users
        if (is_free or now) and self.owner is not None:
            self.owner.stop(number)
        if now:
            self._tell(engine, "kill")

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Return the engines as JSON-serializable dicts: those that the job has (`engines`), and
        those that have left or could not start (`ended`), each in the order of their numbers."""
        with self._lock:
            engines, users, owner = list(self._engines.values()), list(self._users), self.owner
            ended = [_row(each) for each in self._ended]
        rows: list[dict[str, Any]] = []
        for engine in engines:
            uses = [user.use_of(engine.number) for user in users]
            state: str = engine.state
            worker = owner.worker_state(engine.number) if owner is not None else "starting"
            if state == "serving" and worker != "present":
                state = worker
            elif state == "serving" and any(use.is_syncing for use in uses):
                state = "syncing"
            version = uses[0].version if len(uses) == 1 else None
            num_groups = sum(use.num_groups for use in uses)
            rows.append({**_row(engine), "state": state, "version": version, "groups": num_groups})
        return {"engines": rows, "ended": sorted(ended, key=lambda row: row["number"])}

    def _in_state(self, state: State) -> list[_Engine]:
        return [each for each in self._engines.values() if each.state == state]

    def _set_state(self, engine: _Engine, state: State) -> None:
        engine.state, engine.since = state, time.time()

    def _end(self, engine: _Engine, state: State, why: str) -> None:
        self._set_state(engine, state)
        engine.why = why
        del self._engines[engine.number]
        self._ended = [*self._ended, engine][-MAX_ENDED:]

    def _tell(self, engine: _Engine, *kinds: str) -> bool:
        """Send messages about an engine to the rollout rank that runs its workers. Return whether
        the rank is there."""
        with self._lock:
            found = None if engine.place is None else self._ranks.get(engine.place.rank)
        if found is None or engine.place is None:
            return False
        try:
            for kind in kinds:
                gpus = list(engine.place.gpus)
                found[1].send({"type": kind, "engine": engine.number, "gpus": gpus})
        except WireClosed:
            return False
        return True


def _row(engine: _Engine) -> dict[str, Any]:
    return {
        "number": engine.number,
        "place": "" if engine.place is None else engine.place.text(),
        "state": engine.state,
        "since": engine.since,
        "why": engine.why,
    }
