"""This module is a worker that runs freely: it generates single prompts beside each other.

It has a lease of each. Its main thread takes messages and changes the weights; each lease has a thread
that waits for the engine and the reward. Newer weights wait for the leases
(`async.in_flight_updates: finish`), or interrupt them.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from mrl.collect.backlog import Started
from mrl.collect.engine_nodes import served_adapter
from mrl.collect.task import Rollout, make_rollout
from mrl.disaggregated.engine_place import EnginePlace
from mrl.disaggregated.leasing import default_groups
from mrl.disaggregated.worker import Event, Worker
from mrl.environments.beside import EpisodesBeside
from mrl.preflight import Plan
from mrl.rollout.base import EngineLost, PauseMode
from mrl.rollout.beside import beside_others
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.system.heartbeat import beat
from mrl.types import SampleGroup


@dataclass(frozen=True)
class _Held:
    """A lease that this worker holds."""

    lease_id: str
    rollout: Rollout
    episodes: EpisodesBeside | None
    """What plays the conversations; None where a sample is one answer."""


class FreeWorker(Worker):
    """Generates the prompts that it has leases of, until the trainer says that the run is over."""

    def __init__(self, plan: Plan, place: EnginePlace, settings: dict[str, Any]) -> None:
        super().__init__(plan, place, settings)
        config = plan.recipe.asynchronous
        self._interrupts = config.in_flight_updates == "interrupt"
        self._pause_mode: PauseMode = "in_place" if config.kv == "keep" else "retract"
        self._most = config.groups_in_flight or default_groups(
            plan.recipe.rollout.prompts_per_step, plan.num_engines
        )
        self._stale_prefixes = config.stale_prefixes
        self._serves_adapter = served_adapter(plan) is not None
        self._running: dict[str, _Held] = {}
        """The leases whose threads run, by their id."""
        self._has_lost_engine = False
        """Whether another engine is to be started when no lease runs any more."""
        self._lost: list[_Held] = []
        """Leases that wait for another engine."""
        self._scored: set[str] = set()
        """The leases that run and wait for their reward alone."""
        self._asked: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(self._most + 1, thread_name_prefix="mrl-lease")
        self._scoring.begin_step()

    def _heed(self, event: Event) -> None:
        kind = event.message.get("type")
        if kind == "lease":
            (group,) = decode_groups(event.body)
            started = [Started(group, int(event.message["seed"]))]
            lease_id = event.message["lease_id"]
            episodes = self._scoring.episodes()
            on_sample = partial(self._tell_sample, lease_id)
            rollout = make_rollout(self.plan, started, episodes, on_sample)
            self._begin(_Held(lease_id, rollout, episodes))
        elif kind == "score":
            self._scored.add(event.message["lease_id"])
        elif kind == "over":
            self._scored.discard(event.message["lease_id"])
            del self._running[event.message["lease_id"]]
            if (held := event.message["held"]) is None:
                self._place.begin_batch()
            else:
                self._lost.append(held)
                self._has_lost_engine = True

    def _waiting(self) -> str:
        if not self._running:
            return "weights" if self._version is None else "bound"
        if len(self._scored) == len(self._running):
            return "score"
        return "generate" if self._asked["most"] else "drain"

    def _tell_sample(self, lease_id: str, group: SampleGroup, k: int) -> None:
        """Send a sample of a group that is not whole: should this worker be lost, the next one does not
        generate it anew."""
        message = {"type": "sample", "lease_id": lease_id, "place": k}
        alone = dataclasses.replace(group, samples=[group.samples[k]])
        self._wire.send(message, encode_groups([alone]))

    def _begin(self, held: _Held) -> None:
        self._running[held.lease_id] = held
        self._pool.submit(self._run, held)

    def _run(self, held: _Held) -> None:
        """Generate, score and deliver one lease, in a thread of its own."""
        engine = beside_others(self._engine, stale_prefixes=self._stale_prefixes)
        over: dict[str, Any] = {"type": "over", "lease_id": held.lease_id, "held": None}
        try:
            for group in held.rollout.finished(engine):
                self._events.put(Event({"type": "score", "lease_id": held.lease_id}))
                scored, num_failed = self._scoring.score(group)
                if held.episodes is not None:
                    num_failed += held.episodes.num_failed
                beat()
                message = {"type": "group", "lease_id": held.lease_id, "num_failed": num_failed}
                self._wire.send(message, encode_groups([scored]))
        except EngineLost:
            over["held"] = held
        except Exception as error:  # the main thread raises it
            self._events.put(Event(error=error))
            return
        self._events.put(Event(over))

    def _advance(self) -> bool:
        """Load weights, evaluate, or ask for leases; return whether there may be more to do."""
        if self._has_lost_engine and not self._running:
            self._replace_engine()
            return True
        work = next(iter(self._work.values()), None)
        is_due = work is not None and work.version == self._version
        if self._staged and self._interrupts and self._running and not self._has_lost_engine:
            self._interrupt()
            return True
        if self._staged or is_due or self._has_lost_engine:
            self._ask(0)
            if self._running:
                return False
            if is_due and work is not None:
                self._do(work)
            else:
                self._load_newest()
            return True
        if self._version is not None:
            self._ask(self._most)
        return False

    def _ask(self, most: int) -> None:
        """Say how many groups this worker may hold at a time, where that has changed."""
        asked = {"type": "ask", "version": self._version or 0, "most": most}
        if asked != self._asked:
            self._asked = asked
            self._wire.send(asked)

    def _load_newest(self) -> None:
        """Load the newest version that has come; the others were never used."""
        while len(self._staged) > 1:
            self._give_room(self._staged.pop(0))
        former = self._held
        self._load_next()
        if former is not None:
            self._give_room(former)
        self._report()

    def _interrupt(self) -> None:
        """Change the weights under the requests that run. Canaries would need an idle engine.

        A newer adapter comes beside the older one, with which the requests that run finish.
        """
        staging = self._staged.pop()
        self._activity.enter("load")
        try:
            if self._serves_adapter:
                self._update(staging)
            else:
                self._engine.pause(self._pause_mode)
                self._update(staging)
                self._engine.resume()
        except EngineLost:
            # The threads of the leases end: they notice the loss, too, or already have their samples.
            self._has_lost_engine = True
            self._staged.append(staging)
            return
        former, self._held, self._version = self._held, staging, staging.version
        if former is not None:
            self._give_room(former)
        self._report()

    def _replace_engine(self) -> None:
        """Start another engine, and begin again what the lost one left."""
        self._start_another(EngineLost(f"rollout engine {self._place.number} was lost"))
        if self._staged:
            self._load_newest()
        else:
            assert self._held is not None
            self._load(self._held)
            self._report()
        lost, self._lost, self._has_lost_engine = self._lost, [], False
        for held in lost:
            self._begin(held)
