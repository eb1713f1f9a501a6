"""The loop of a service: tenants join and leave, roll out together, and are trained in turn.

Every rank runs it. Rank 0 reads what users want and says it to the others, so that all do the same. A
round is one rollout phase, in which the requests of all tenants share the engine, and then one update
of each tenant that has its samples.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.errors import EngineGone, InputError, OutOfMemory, RankLost
from mrl.exchange.sharing import share_bytes, sum_over_ranks
from mrl.rollout.base import EngineLost
from mrl.run import console
from mrl.run.json_lines import add_line
from mrl.system.clock import Clock
from mrl.system.heartbeat import begin_step, phase
from mrl.system.stop import StopRequest
from mrl.tenants.crashes import REASON, Crashes
from mrl.tenants.house import House
from mrl.tenants.record import State
from mrl.tenants.registry import Registry
from mrl.tenants.schedule import Phase, TrainingQueue
from mrl.tenants.tenant_run import TenantRun

SERVICE_FAULTS = (EngineGone, EngineLost, RankLost, OutOfMemory, MemoryError, dist.DistError)
"""Errors that end the service, whoever's work they came from: nobody can go on after them."""
Publish = Callable[[dict[str, float]], None]
STOP_LIMIT_S = 25.0
"""Seconds from SIGTERM or SIGHUP to the end of the process."""
LOST = (
    f"the round was not over and saved after {STOP_LIMIT_S:g} s; every tenant goes back to its newest "
    "checkpoint"
)
IDLE_S = 0.1
"""Seconds between two looks for tenants while there are none."""


class Service:
    """Serves the tenants of a registry until it is told to stop. Every method is a collective."""

    def __init__(
        self,
        config: ServiceConfig,
        house: House,
        registry: Registry | None,
        publish: Publish = lambda metrics: None,
    ) -> None:
        """`registry`: None on all ranks but the first. `publish` is told the metrics of each round."""
        self._config, self._house, self._registry, self._publish = config, house, registry, publish
        self._is_main = registry is not None
        self._runs: dict[str, TenantRun] = {}
        self._wanting: list[str] = []
        """Tenants that want samples, in the order in which they began to."""
        self._queue = TrainingQueue(config.schedule.max_wait_s)
        self._phase = Phase(config.lora.slots, config.schedule.max_wait_s)
        self._stop = StopRequest(STOP_LIMIT_S, lost=LOST)
        self._crashes = Crashes(None if registry is None else registry.root)
        self._round = 0

    def serve(self, *, until_done: bool = False) -> int:
        """Run rounds until a signal comes; return its number in `mrl.system.stop`, 0 for none.

        `until_done`: also end when no tenant is queued or running. Every tenant is saved at the end.
        """
        for name in self._crashes.take_culprits():
            self._note(name, "paused", REASON)
        with self._stop.heeding_signals():
            self._start_engine()
            try:
                while not (told := self._told()):
                    if self._heed_users():
                        self.run_round()
                    elif until_done:
                        break
                    else:
                        time.sleep(IDLE_S)
                for run in list(self._runs.values()):
                    self._attempt(run, run.leave)
                return told
            finally:
                self.close()

    def close(self) -> None:
        """Let go of the tenants without a save, and stop the engine. Harmless when repeated."""
        for run in self._runs.values():
            with contextlib.suppress(RuntimeError):
                run.close()
        self._runs.clear()
        self._house.slot.stop()

    def run_round(self) -> None:
        """Collect the samples of all tenants at once, then train each with its own."""
        begin_step(self._round)
        self._house.slot.begin_step()
        clock = Clock()
        self._wanting += [name for name in self._runs if name not in self._wanting]
        members = self._members()
        self._collect([self._runs[name] for name in members], clock)
        with clock.part("train"):
            waits = self._train([run for run in self._present(members) if not run.is_done])
        if self._is_main:
            self._note_round(members, waits, clock)
        for run in [run for run in self._present(members) if run.is_over]:
            self._finish(run)
        self._wanting = [name for name in self._wanting if name not in members]
        self._round += 1

    def _present(self, names: Iterable[str]) -> list[TenantRun]:
        """Return the runs of these tenants, less those that have ended meanwhile."""
        return [self._runs[name] for name in names if name in self._runs]

    def _members(self) -> list[str]:
        """Return who takes part in the next rollout phase."""
        self._wanting = [name for name in self._wanting if name in self._runs]
        wanting = {name: self._runs[name].tokens_of_step for name in self._wanting}
        capacity = self._config.rollout.max_total_tokens
        return self._phase.start(capacity or sum(wanting.values()), wanting)

    def _told(self) -> int:
        return max((int(said) for said in share_bytes(b"%d" % self._stop.asked)), default=0)

    @phase("start")
    def _start_engine(self) -> None:
        self._house.base.offload()
        dist.barrier()
        self._house.slot.start()
        dist.barrier()

    def _heed_users(self) -> bool:
        """Open and end runs as the registry says; return whether any is left."""
        wanted = self._wanted()
        for name in [name for name in self._runs if name not in wanted]:
            run = self._runs[name]
            if self._attempt(run, run.leave):  # else it is forgotten already
                self._forget(name)
        for name, (weight, tree) in wanted.items():
            if name not in self._runs:
                self._open(name, weight, Recipe.model_validate(tree))
        return bool(self._runs)

    def _wanted(self) -> dict[str, tuple[float, dict[str, object]]]:
        """Return weight and recipe of each tenant that is to run, in the order in which they joined.
        The recipe is empty where the run is open."""
        said = b""
        if self._registry is not None:
            wanted: dict[str, tuple[float, dict[str, object]]] = {}
            for tenant in self._registry.tenants():
                if tenant.state in ("queued", "running"):
                    with self._pausing(tenant.name):
                        wanted[tenant.name] = tenant.weight, self._recipe_of(tenant.name)
            said = json.dumps(wanted).encode()
        return json.loads(share_bytes(said)[0])

    def _recipe_of(self, name: str) -> dict[str, object]:
        """Return the recipe of a tenant that is yet to open, and nothing for one that is open."""
        assert self._registry is not None
        return {} if name in self._runs else self._registry.recipe(name).model_dump(mode="json")

    @contextlib.contextmanager
    def _pausing(self, name: str) -> Iterator[None]:
        """Pause a tenant whose stored recipe is refused in the block; for rank 0."""
        try:
            yield
        except InputError as error:
            self._note(name, "paused", str(error))

    def _open(self, name: str, weight: float, recipe: Recipe) -> None:
        opened: list[TenantRun] = []

        def open_run() -> None:
            opened.append(TenantRun(name, weight, recipe, dist.get_world_size(), self._house))

        if failure := self._failure_of(name, open_run):
            for run in opened:
                run.close()
            self._note(name, "paused", failure)
            return
        (self._runs[name],) = opened
        self._queue.join(name, weight)
        self._note(name, "running")

    def _collect(self, runs: Sequence[TenantRun], clock: Clock) -> None:
        """Generate and score the samples of one step of each tenant."""
        names = [run.name for run in runs]
        for run in runs:
            self._attempt(run, run.begin)
        while open_runs := [run for run in self._present(names) if not run.collector.is_over]:
            slot = self._house.slot
            slot.is_needed = any(run.collector.num_remaining for run in open_runs)
            with clock.part("sync"):
                self._sync(open_runs)
            with clock.part("rollout"):
                self._generate([run for run in open_runs if run.name in self._runs])
                slot.sleep()
            was_lost = slot.replace_lost(clock)
            with clock.part("score"):
                for run in [run for run in open_runs if run.name in self._runs]:
                    run.collector.end_generation(was_lost=was_lost)
                    self._attempt(run, run.score)

    @phase("sync")
    def _sync(self, runs: Sequence[TenantRun]) -> None:
        """Give the device to the engine, which then holds the adapters of these tenants."""
        house = self._house
        house.base.onload()
        for run in runs:
            self._attempt(run, run.prepare_sync)
        dist.barrier()  # an engine wakes on the devices of several ranks
        house.slot.wake_weights()
        for run in [run for run in runs if run.name in self._runs]:
            self._attempt(run, run.send)
        house.base.unmount()
        house.base.offload()
        dist.barrier()
        house.slot.wake_cache()
        for run in [run for run in runs if run.name in self._runs]:
            self._attempt(run, run.check_sync)

    @phase("rollout")
    def _generate(self, runs: Sequence[TenantRun]) -> None:
        """Generate for all tenants at once, each in a thread of its own."""
        failures = dict.fromkeys((run.name for run in runs), "")

        def generate(run: TenantRun) -> None:
            try:
                run.collector.generate(run.clock)
            except SERVICE_FAULTS:
                raise
            except Exception as error:
                failures[run.name] = describe(error)

        with ThreadPoolExecutor(max(1, len(runs)), thread_name_prefix="tenant") as pool:
            for future in [pool.submit(generate, run) for run in runs]:
                future.result()
        for run in runs:
            if failure := self._first(failures[run.name]):
                self._pause(run, failure)

    def _train(self, runs: Sequence[TenantRun]) -> dict[str, float]:
        """Train each tenant with what was collected for it, in the order of the queue; return how long
        each has waited for it, in seconds."""
        self._house.base.onload()
        now, waits = time.time(), {}
        for run in runs:
            self._queue.ready(run.name, now)
        while name := self._next():
            begun, start = time.time(), time.perf_counter()
            waits[name] = begun - now
            run = self._runs[name]
            failure = self._failure_of(name, run.train)
            if self._is_main:
                self._queue.done(time.perf_counter() - start)
            if failure:
                self._pause(run, failure)
            self._attempt(run, run.check_disk)
        return waits

    def _next(self) -> str:
        """Return who is trained next, as rank 0's clock has it; empty where nobody waits."""
        name = self._queue.take(time.time()) if self._is_main else None
        return share_bytes((name or "").encode())[0].decode()

    def _finish(self, run: TenantRun) -> None:
        if self._attempt(run, run.leave):
            self._note(run.name, "done")
            self._forget(run.name)

    def _attempt(self, run: TenantRun, action: Callable[[], object]) -> bool:
        """Do something for one tenant, and pause it where that fails; return whether it succeeded."""
        if run.name not in self._runs:
            return False
        if failure := self._failure_of(run.name, action):
            self._pause(run, failure)
        return not failure

    def _failure_of(self, name: str, action: Callable[[], object]) -> str:
        """Do something that is one tenant's; return what went wrong on any rank, empty for nothing."""
        failure = ""
        step = self._runs[name].trainer.step if name in self._runs else -1
        self._crashes.begin(name, step)
        try:
            action()
        except SERVICE_FAULTS:
            raise  # an end of the service during this tenant's work
        except (Exception, SystemExit) as error:
            failure = describe(error)
        failure = self._first(failure)
        self._crashes.end()
        return failure

    def _first(self, failure: str) -> str:
        """Return what went wrong on the first rank on which anything did; empty for none."""
        if not sum_over_ranks(bool(failure)):
            return ""
        return next(said.decode() for said in share_bytes(failure.encode()) if said)

    def _pause(self, run: TenantRun, reason: str) -> None:
        """End a run that failed; its newest checkpoint is where it goes on."""
        with contextlib.suppress(RuntimeError, OSError):
            run.close()
        self._forget(run.name)
        self._note(run.name, "paused", reason)

    def _forget(self, name: str) -> None:
        self._runs.pop(name, None)
        self._queue.leave(name)
        self._crashes.forget(name)

    def _note(self, name: str, state: State, reason: str = "") -> None:
        """Write a tenant's state down, unless a user was faster."""
        if self._registry is not None:
            if reason:
                console.warning(f"tenant {name} is paused: {reason}")
            self._registry.try_move(name, state, reason)

    def _note_round(self, members: Sequence[str], waits: Mapping[str, float], clock: Clock) -> None:
        assert self._registry is not None
        row: dict[str, float] = {"round": self._round, "service/phase_tenants": len(members)}
        row |= {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
        row |= {"time/round_s": clock.elapsed_s, "time/timestamp": time.time()}
        row["service/queue_age_s"] = max(waits.values(), default=0.0)
        for run in self._present(members):
            row[f"service/{run.name}/swap_s"] = run.swap.seconds
            row[f"service/{run.name}/swap_bytes"] = run.swap.num_bytes
            row[f"service/{run.name}/update_s"] = run.update_s
            row[f"service/{run.name}/queue_age_s"] = waits.get(run.name, 0.0)
        add_line(self._registry.root / "metrics.jsonl", row)
        self._publish(row)


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {text}"
    )
