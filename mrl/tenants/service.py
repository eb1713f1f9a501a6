"""The loop of a service: tenants join, take their turns, fail by themselves, and leave.

Every rank runs it. Rank 0 reads what users want and says it to the others, so that all do the same. How
samples come and who is trained when is in colocated.py and disaggregated.py.
"""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

import torch.distributed as dist

from mrl.config import Recipe, ServiceConfig
from mrl.errors import EngineGone, InputError, OutOfMemory, RankLost
from mrl.exchange.sharing import share_bytes
from mrl.rollout.base import EngineLost
from mrl.run import console
from mrl.run.json_lines import add_line
from mrl.system import disk
from mrl.system.heartbeat import beat, working_for
from mrl.system.memory_error import noting_bytes, out_of_memory
from mrl.system.stop import StopRequest
from mrl.tenants import accord
from mrl.tenants.accord import Accord, FailedAlone
from mrl.tenants.crashes import Crashes
from mrl.tenants.house import House
from mrl.tenants.phase_times import engine_metrics, of_names
from mrl.tenants.record import Loop, State, Tenant, engine_name, name_of, sequence_of
from mrl.tenants.registry import Registry, WrongState
from mrl.tenants.schedule import TrainingQueue
from mrl.tenants.sessions.run import SessionRun
from mrl.tenants.tenant_run import TenantRun

SERVICE_FAULTS = (
    *(EngineGone, EngineLost, RankLost, OutOfMemory, MemoryError, dist.DistError),
    FailedAlone,
)
"""Errors that end the service, whoever's work they came from: nobody can go on after them."""
Publish = Callable[[dict[str, float]], None]
Run = TypeVar("Run", bound=TenantRun | SessionRun)
LOST = (
    "what was under way was not over and saved after checkpoint.stop_limit_s={:g} s; every tenant goes "
    "back to its newest checkpoint"
)
IDLE_S = 0.1
"""Seconds between two looks for tenants while there are none."""


class Wanted(NamedTuple):
    """What rank 0 tells the others of a tenant that is to run."""

    incarnation: str
    weight: float
    loop: Loop
    waiting_tokens: int
    """What waits in the queue of a session."""
    tree: dict[str, object]
    """Its recipe; empty where the run is open."""


class Service(ABC, Generic[Run]):
    """Serves the tenants of a registry until it is told to stop. Every method is a collective."""

    def __init__(
        self,
        config: ServiceConfig,
        house: House,
        registry: Registry | None,
        publish: Publish = lambda metrics: None,
    ) -> None:
        """`registry`: None on all ranks but the first. `publish` is told the metrics of the service."""
        self._config, self._registry, self._publish = config, registry, publish
        self._house = house
        self._is_main = registry is not None
        self._runs: dict[str, Run] = {}
        self._opened: dict[str, str] = {}
        """The newest incarnation that was opened for each name."""
        self._queue = TrainingQueue(config.schedule.max_wait_s)
        limit_s = config.checkpoint.stop_limit_s
        self._stop = StopRequest(limit_s, lost=LOST.format(limit_s))
        self._accord = Accord(config.longest_wait_s)
        self._crashes = Crashes(None if registry is None else registry.root)
        self._loses_rows = False
        self.num_turns = 0
        """The turns that are over."""

    def serve(self, *, until_done: bool = False) -> int:
        """Let tenants have their turns until a signal comes; return its number in `mrl.system.stop`, 0
        for none.

        `until_done`: also end when no tenant is queued or running. Every tenant is saved at the end.
        """
        with self._stop.heeding_signals():
            try:
                with noting_bytes(self._house.bytes_held):
                    self._house.start()
                    told = self._take_turns(until_done=until_done)
                    for run in list(self._runs.values()):
                        self._attempt(run, run.leave)
                    self._write_kept()
                    return told
            finally:
                self.close()

    def _take_turns(self, *, until_done: bool) -> int:
        while not (told := self._told()):
            if self.heed_users():
                self.run_turn()
                self.num_turns += 1
            elif until_done:
                break
            else:
                beat()  # to wait for users is no hang
                time.sleep(IDLE_S)
        return told

    def close(self) -> None:
        """Let go of the tenants without a save, and stop the engines. Harmless when repeated."""
        for run in self._runs.values():
            with contextlib.suppress(RuntimeError):
                run.close()
        self._runs.clear()
        self._house.close()

    @abstractmethod
    def run_turn(self) -> None:
        """Bring the tenants further: one or several of them by a step, or by a part of one."""

    @abstractmethod
    def _new_run(self, name: str, weight: float, recipe: Recipe) -> Run:
        """Return the run of a tenant that joins. Raises what is wrong with it."""

    def _new_session(self, name: str, weight: float, recipe: Recipe) -> Run:
        """Return the run of a session that joins. Raises what is wrong with it."""
        raise InputError(f"{name} is a session, which only a colocated service can have; remove it")

    def _present(self, names: Iterable[str]) -> list[Run]:
        """Return the runs of these tenants, less those that have ended meanwhile."""
        return [self._runs[name] for name in names if name in self._runs]

    def _told(self) -> int:
        return max((int(said) for said in share_bytes(b"%d" % self._stop.asked)), default=0)

    def heed_users(self) -> bool:
        """Open and end runs as the registry says; return whether any has something to do."""
        self._write_kept()
        wanted = self._wanted()
        for name, run in list(self._runs.items()):
            if name in wanted and wanted[name].incarnation == self._opened[name]:
                continue
            if self._attempt(run, run.leave):  # else it is forgotten already
                self._forget(name)
        for name, each in wanted.items():
            if name not in self._runs:
                self._open(name, each)
            if name in self._runs:
                self._runs[name].heed(each.waiting_tokens)
        return any(run.wants_turn for run in self._runs.values())

    def _wanted(self) -> dict[str, Wanted]:
        """Return what is known of each tenant that is to run, in the order in which they joined."""
        said = b""
        if self._registry is not None:
            wanted: dict[str, Wanted] = {}
            for tenant in self._registry.tenants():
                if tenant.state in ("queued", "running"):
                    with self._pausing(tenant):
                        waiting = self._registry.operations.waiting_tokens(tenant.incarnation)
                        tree = self._recipe_of(tenant)
                        wanted[tenant.name] = Wanted(
                            tenant.incarnation, tenant.weight, tenant.loop, waiting, tree
                        )
            said = json.dumps(wanted).encode()
        return {name: Wanted(*each) for name, each in json.loads(share_bytes(said)[0]).items()}

    def _recipe_of(self, tenant: Tenant) -> dict[str, object]:
        """Return the recipe of a tenant that is not open yet, and nothing for one that is open. Raises
        WrongState if the name belongs to another tenant by now."""
        assert self._registry is not None
        if tenant.name in self._runs and self._opened[tenant.name] == tenant.incarnation:
            return {}
        recipe = self._registry.recipe(tenant.name).model_dump(mode="json")
        self._registry.require_same(tenant)  # the recipe that was read belongs to it
        return recipe

    @contextlib.contextmanager
    def _pausing(self, tenant: Tenant) -> Iterator[None]:
        """Pause a tenant whose stored recipe is refused in the block, and skip one that a user has
        changed in the meantime; for rank 0."""
        try:
            yield
        except WrongState:
            pass
        except InputError as error:
            self._note(tenant.incarnation, "paused", str(error))

    def _open(self, name: str, wanted: Wanted) -> None:
        recipe, opened = Recipe.model_validate(wanted.tree), list[Run]()
        self._opened[name] = wanted.incarnation
        make = self._new_session if wanted.loop == "client" else self._new_run

        def open_run() -> None:
            opened.append(make(name, wanted.weight, recipe))

        if failure := self._failure_of(name, open_run):
            for run in opened:
                run.close()
            self._note(wanted.incarnation, "paused", failure)
            return
        (self._runs[name],) = opened
        self._queue.join(name, wanted.weight)
        self._note(wanted.incarnation, "running")

    def _train(self, name: str) -> None:
        """Train the tenant whom the queue has chosen."""
        run, start = self._runs[name], time.perf_counter()
        failure = self._failure_of(name, run.train)
        if self._is_main:
            self._queue.done(time.perf_counter() - start)
        if failure:
            self._pause(run, failure)
        self._attempt(run, run.check_disk)

    def _next(self) -> str:
        """Return who is trained next, as rank 0's clock has it; empty where nobody waits."""
        name = self._queue.take(time.time()) if self._is_main else None
        return share_bytes((name or "").encode())[0].decode()

    def _finish(self, run: Run) -> None:
        if self._attempt(run, run.leave):
            self._note(self._opened[run.name], "done")
            self._forget(run.name)

    def _attempt(self, run: Run, action: Callable[[], object]) -> bool:
        """Do something for one tenant, and pause it where that fails; return whether it succeeded."""
        if run.name not in self._runs:
            return False
        if failure := self._failure_of(run.name, action):
            self._pause(run, failure)
        return not failure

    def _failure_of(self, name: str, action: Callable[[], object]) -> str:
        """Do something that is one tenant's; return what went wrong on any rank, empty for nothing."""
        failure = ""
        step = self._runs[name].step if name in self._runs else -1
        self._crashes.begin(self._opened[name], step)
        with working_for(name, step):
            try:
                action()
            except SERVICE_FAULTS:
                raise  # an end of the service during this tenant's work
            except (Exception, SystemExit) as error:
                if out_of_memory(error):
                    raise
                failure = describe(error)
            failure = self._accord.first(failure, limit_s=accord.ALONE_S)
        self._crashes.end()
        return failure

    def _first(self, failure: str) -> str:
        """Return what went wrong on the first rank on which anything did; empty for none."""
        return self._accord.first(failure)

    def _pause(self, run: Run, reason: str) -> None:
        """End a run that failed; its newest checkpoint is where it goes on."""
        with contextlib.suppress(RuntimeError, OSError):
            run.close()
        self._forget(run.name)
        self._note(self._opened[run.name], "paused", reason)

    def _forget(self, name: str) -> None:
        self._runs.pop(name, None)
        self._queue.leave(name)
        self._crashes.forget(self._opened[name])

    def _note(self, incarnation: str, state: State, reason: str = "") -> None:
        """Write a tenant's state down, unless a user was faster."""
        if self._registry is not None:
            name = name_of(incarnation)
            is_moved = self._registry.try_move(incarnation, state, reason)
            if reason:
                is_now = "is paused" if is_moved else "was paused or removed, and had failed"
                console.warning(f"tenant {name} {is_now}: {reason}")
            if is_moved and name in self._registry.kept:
                console.warning(
                    f"the disk refuses the state of tenant {name} ({state}): it is written as soon as "
                    f"there is room in {self._registry.root}, and lost where the service ends before"
                )

    def _write_kept(self) -> None:
        """Write the states of tenants that the disk has refused so far."""
        if self._registry is not None:
            for name in self._registry.write_kept():
                console.warning(f"the state of tenant {name} is on the disk now")

    def _engine_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the requests that passed the gates of engines."""
        names = {engine_name(each): name for name, each in self._opened.items()}
        return engine_metrics(of_names(sums, names))

    def _write_row(self, row: dict[str, float]) -> None:
        """Write and publish metrics of the service, with the tenants' sequences; for rank 0."""
        assert self._registry is not None
        for name, incarnation in self._opened.items():
            if any(key.startswith(f"service/{name}/") for key in row):
                row[f"service/{name}/sequence"] = float(sequence_of(incarnation))
        try:
            add_line(self._registry.root / "metrics.jsonl", row)
            self._loses_rows = False
        except OSError as error:
            if not self._loses_rows:  # said once
                why = disk.describe(error, self._registry.root)
                console.warning(f"{why}; rows are left out until there is room")
            self._loses_rows = True
        self._publish(row)


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return (
        text if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {text}"
    )
