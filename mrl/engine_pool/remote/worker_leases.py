"""The schedule of a worker that holds leases, each for the group of one prompt, and generates these
groups concurrently.

The main thread handles messages and changes the weights. Each lease has a thread that waits for the
engine and the reward. Newer weights are loaded either when all leases have finished
(`async.in_flight_updates: finish`) or in the middle of generation (`interrupt`).
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from mrl.collect.backlog import Started
from mrl.collect.endpoint.rollout import GroupAgents
from mrl.collect.multi_turn import GroupEnvironments
from mrl.collect.scoring import Scoring
from mrl.collect.task import Rollout, make_rollout
from mrl.engine_pool.engine_nodes import served_adapter
from mrl.engine_pool.remote.driver import EngineDriver, raising
from mrl.engine_pool.remote.lease_schedule import default_groups
from mrl.engine_pool.remote.messages import FinishedGroup, FinishedSample, LeasedGroup
from mrl.engines.base import EngineLost, PauseMode
from mrl.preflight import Plan
from mrl.system.heartbeat import beat
from mrl.types import SampleGroup


@dataclass(frozen=True)
class Lease:
    """A lease that this worker holds. The worker is generating the group of the lease's prompt."""

    lease_id: str
    rollout: Rollout
    episodes: GroupEnvironments | GroupAgents | None
    """Runs the environments or agents of the conversations; None if the recipe has no environment."""


class Leases:
    """A `Schedule` that generates the groups of a worker's leases concurrently. Each lease is for
    the group of one prompt."""

    def __init__(self, driver: EngineDriver, plan: Plan, scoring: Scoring) -> None:
        """`scoring` scores the groups."""
        config = plan.recipe.asynchronous
        self._driver, self._plan = driver, plan
        self._interrupts = config.in_flight_updates == "interrupt"
        self._pause_mode: PauseMode = "in_place" if config.kv == "keep" else "retract"
        self._max_leases = config.groups_in_flight or default_groups(
            plan.recipe.rollout.prompts_per_step, plan.num_engines
        )
        self._options = {"concurrent": True, "stale_prefixes": config.stale_prefixes}
        """Options of `PolicyEndpoint.generate` with which the groups of leases are generated."""
        self._serves_adapter = served_adapter(plan) is not None
        self._running: dict[str, Lease] = {}
        """The leases whose threads are running, by lease id."""
        self._is_engine_lost = False
        """Whether the engine is lost. Another engine is started once no lease has a running
        thread."""
        self._interrupted: list[Lease] = []
        """Leases whose threads ended because the engine was lost, and which the next engine will
        continue."""
        self._scored: set[str] = set()
        """Ids of running leases whose samples are generated and wait for their rewards."""
        self._asked: dict[str, Any] = {}
        """The last `ask` message that was sent to the trainer."""
        self._threads = ThreadPoolExecutor(self._max_leases + 1, thread_name_prefix="mrl-lease")
        self._scoring = scoring
        self._scoring.begin_step()

    def handle(self, message: dict[str, Any], body: bytes) -> None:
        if message.get("type") == "lease":
            plan, leased = self._plan, LeasedGroup.of_frame(message, body)
            started = [Started(leased.group, leased.seed)]
            episodes = self._scoring.episodes()
            on_sample = partial(self._send_sample, leased.lease_id)
            rollout = make_rollout(
                plan.recipe, plan, started, episodes, on_sample=on_sample, options=self._options
            )
            self._begin(Lease(leased.lease_id, rollout, episodes))

    def waits_in(self) -> str:
        if not self._running:
            return "weights" if self._driver.version is None else "bound"
        if len(self._scored) == len(self._running):
            return "score"
        return "generate" if self._asked["most"] else "drain"

    def _send_sample(self, lease_id: str, group: SampleGroup, k: int) -> None:
        """Send sample `k` of an incomplete group to the trainer. If this worker is lost, the next
        worker need not generate the sample again."""
        alone = dataclasses.replace(group, samples=[group.samples[k]])
        self._driver.wire.send(*FinishedSample(lease_id, alone, k).frame())

    def _begin(self, lease: Lease) -> None:
        self._running[lease.lease_id] = lease
        self._threads.submit(self._run, lease)

    def _run(self, lease: Lease) -> None:
        """Generate and score the group of a lease and send it to the trainer, in the lease's
        thread."""
        driver, lease_id = self._driver, lease.lease_id
        is_lost = False
        try:
            for group in lease.rollout.finished(driver.engine.endpoint):
                driver.main.put(partial(self._scored.add, lease_id))
                scored, num_failed = self._scoring.score(group)
                if lease.episodes is not None:
                    num_failed += lease.episodes.num_failed
                beat()
                driver.wire.send(*FinishedGroup(lease_id, scored, num_failed).frame())
        except EngineLost:
            is_lost = True
        except Exception as error:
            driver.main.put(raising(error))
            return
        driver.main.put(partial(self._end, lease, is_engine_lost=is_lost))

    def _end(self, lease: Lease, *, is_engine_lost: bool) -> None:
        """Record that the thread of a lease has ended. `is_engine_lost`: whether it ended because
        the engine was lost."""
        self._scored.discard(lease.lease_id)
        del self._running[lease.lease_id]
        if is_engine_lost:
            self._interrupted.append(lease)
            self._is_engine_lost = True
        else:
            self._driver.engine.owner.reset_losses()

    def advance(self) -> bool:
        driver, waiting = self._driver, self._driver.versions.waiting
        if self._is_engine_lost and not self._running:
            self._replace_engine()
            return True
        work = driver.next_work
        is_due = work is not None and work.version == driver.version
        if waiting and self._interrupts and self._running and not self._is_engine_lost:
            self._interrupt()
            return True
        if waiting or is_due or self._is_engine_lost:
            self._ask(0)
            if self._running:
                return False
            if is_due and work is not None:
                driver.do(work)
            else:
                self._load_newest()
            return True
        if driver.version is not None:
            self._ask(self._max_leases)
        return False

    def _ask(self, most: int) -> None:
        """Tell the trainer the engine's version and how many leases this worker may hold at a time.
        Nothing is sent if neither has changed."""
        asked = {"type": "ask", "version": self._driver.version or 0, "most": most}
        if asked != self._asked:
            self._asked = asked
            self._driver.wire.send(asked)

    def _load_newest(self) -> None:
        """Load the newest version in `versions.waiting`. Free the buffers of all older versions,
        including the version that was loaded before."""
        versions = self._driver.versions
        while len(versions.waiting) > 1:
            versions.free(versions.waiting.pop(0))
        former = versions.loaded
        self._driver.load_next()
        if former is not None:
            versions.free(former)
        self._driver.report_metrics()

    def _interrupt(self) -> None:
        """Load newer weights while requests are running.

        Full weights are loaded while the engine is paused. An adapter is loaded without a pause,
        and requests that are already running finish with the older adapter. Canaries are not
        checked, because they need an idle engine.
        """
        driver, versions = self._driver, self._driver.versions
        staging = versions.waiting.pop()
        driver.activity.enter("load")
        try:
            if self._serves_adapter:
                driver.update(staging)
            else:
                server = driver.engine.owner.server
                server.pause(self._pause_mode)
                driver.update(staging)
                server.resume()
        except EngineLost:
            # The threads of the leases end by themselves: they notice the loss or have their samples.
            self._is_engine_lost = True
            versions.waiting.append(staging)
            return
        former, versions.loaded, driver.version = versions.loaded, staging, staging.version
        if former is not None:
            versions.free(former)
        driver.report_metrics()

    def _replace_engine(self) -> None:
        """Start another engine after a loss, and continue the interrupted leases."""
        driver = self._driver
        driver.replace_engine(EngineLost(f"rollout engine {driver.engine.owner.number} was lost"))
        if driver.versions.waiting:
            self._load_newest()
        else:
            driver.reload()
            driver.report_metrics()
        leases, self._interrupted, self._is_engine_lost = self._interrupted, [], False
        for lease in leases:
            self._begin(lease)
