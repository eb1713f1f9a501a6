"""The loop of a service: it opens and closes the runs of tenants, gives them turns, and pauses a
tenant whose work fails.

Every trainer rank runs the loop. Rank 0 reads the registry and tells the other ranks what it has
found, so that all ranks do the same. colocated.py and disaggregated.py decide how samples are
generated and which tenants a turn trains.
"""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from mrl.config import Recipe
from mrl.engine_pool.elastic.membership import Membership
from mrl.errors import DiskFailed, InputError
from mrl.exchange.sharing import share_bytes
from mrl.run import console
from mrl.run.json_lines import add_line
from mrl.service import consensus
from mrl.service.consensus import SERVICE_FAULTS, FailureConsensus, describe
from mrl.service.crashes import Crashes
from mrl.service.metrics import engine_metrics, of_names
from mrl.service.record import Loop, State, Tenant, engine_name, name_of, sequence_of
from mrl.service.registry import Registry, WrongState
from mrl.service.schedule import TrainingQueue
from mrl.service.sessions.run import SessionRun
from mrl.service.shared import SharedResources
from mrl.service.tenant_run import TenantRun
from mrl.system import disk
from mrl.system.heartbeat import beat, working_for
from mrl.system.memory_error import noting_bytes, out_of_memory
from mrl.system.stop import StopRequest

Publish = Callable[[dict[str, float]], None]
Run = TenantRun | SessionRun
LOST = (
    "what was under way was not over and saved after checkpoint.stop_limit_s={:g} s; every tenant goes "
    "back to its newest checkpoint"
)
STARTING = "starting the engine"
IDLE_S = 0.1
"""Seconds between two checks of the registry while no tenant has anything to do."""


class Wanted(NamedTuple):
    """What rank 0 tells the other ranks about a tenant that is to run."""

    incarnation: str
    weight: float
    loop: Loop
    waiting_tokens: int
    """For a session, the number of tokens in the `sample` operations of its next turn, at least 1
    if any operation waits; 0 for other tenants."""
    tree: dict[str, object]
    """The tenant's resolved recipe; empty if the tenant's run is open already."""


class Service(ABC):
    """Serves the tenants of a registry until a signal stops it. Every method is a collective."""

    def __init__(
        self, shared: SharedResources[Any], registry: Registry | None, publish: Publish
    ) -> None:
        """`registry`: None on all ranks except rank 0. `publish`: rank 0 calls it with each row of
        the service's metrics."""
        self._shared, self._registry, self._publish = shared, registry, publish
        self._config = config = shared.config
        self._is_main = registry is not None
        self._runs: dict[str, Run] = {}
        self._opened: dict[str, str] = {}
        """For each tenant name, the id (`Tenant.incarnation`) of the tenant whose run was opened
        last."""
        self._queue = TrainingQueue(config.schedule.max_wait_s)
        limit_s = config.checkpoint.stop_limit_s
        self._stop = StopRequest(limit_s, lost=LOST.format(limit_s))
        self._consensus = FailureConsensus(config.longest_wait_s)
        self._crashes = Crashes(None if registry is None else registry.root)
        self._loses_rows = False
        self.num_turns = 0
        """The number of completed turns."""

    def serve(self, *, until_done: bool = False) -> int:
        """Give tenants turns until a stop signal arrives, then save every tenant. Return which
        signal it was, as a key of `mrl.system.stop.WHO`, or 0 if there was none.

        `until_done`: also end when no tenant has anything left to do.
        """
        with self._stop.handling_signals():
            try:
                with noting_bytes(self._shared.bytes_held):
                    with console.progress(STARTING) if self._is_main else contextlib.nullcontext():
                        self._shared.engines.start(self._shared.base)
                    signal = self._take_turns(until_done=until_done)
                    for run in list(self._runs.values()):
                        self._attempt(run, run.leave)
                    self._write_kept()
                    return signal
            finally:
                self.close()

    def _take_turns(self, *, until_done: bool) -> int:
        while not (signal := self._stop_signal()):
            if self.follow_registry():
                self.run_turn()
                self.num_turns += 1
            elif until_done:
                break
            else:
                beat()  # waiting for users is not a hang
                time.sleep(IDLE_S)
        return signal

    def close(self) -> None:
        """Close the tenants' runs without saving them, and stop the engines. Harmless when
        repeated."""
        for run in self._runs.values():
            _close(run)
        self._runs.clear()
        self._shared.engines.close()

    @property
    def membership(self) -> Membership | None:
        """The engines that may be added and removed; None if there are none, and on all ranks except
        rank 0."""
        return None

    @abstractmethod
    def run_turn(self) -> None:
        """Advance one or several tenants by a step, or by a part of a step."""

    def _new_run(self, incarnation: str, weight: float, recipe: Recipe) -> TenantRun:
        """Open and return the run of a tenant with a recipe. If the run cannot be opened, the error
        is raised."""
        return TenantRun(incarnation, weight, recipe, self._shared)

    def _new_session(self, incarnation: str, weight: float, recipe: Recipe) -> SessionRun:
        """Open and return the run of a session. If the run cannot be opened, the error is raised."""
        queue = None if self._registry is None else self._registry.operations
        agree = partial(self._consensus.first, limit_s=consensus.ALONE_S)
        return SessionRun(incarnation, weight, recipe, self._shared, queue, agree)

    def _present(self, names: Iterable[str]) -> list[Run]:
        """Return the runs of these tenants, without tenants whose run is not open any more."""
        return [self._runs[name] for name in names if name in self._runs]

    def _stop_signal(self) -> int:
        """Return which signal any rank has received, as a key of `mrl.system.stop.WHO`; 0 if no
        rank has received one."""
        return max((int(each) for each in share_bytes(b"%d" % self._stop.source)), default=0)

    def follow_registry(self) -> bool:
        """Open and close runs, so that the open runs are exactly those of the tenants that are to
        run. Return whether any open run has something to do."""
        self._write_kept()
        wanted = self._wanted()
        for name, run in list(self._runs.items()):
            if name in wanted and wanted[name].incarnation == self._opened[name]:
                continue
            if self._attempt(run, run.leave):  # otherwise `_attempt` has forgotten it
                self._forget(name)
        for name, each in wanted.items():
            if name not in self._runs:
                self._open(name, each)
            if name in self._runs:
                self._runs[name].note_waiting(each.waiting_tokens)
        return any(run.wants_turn for run in self._runs.values())

    def _wanted(self) -> dict[str, Wanted]:
        """Return what rank 0 knows about each tenant that is to run, by name, in the order in which
        the tenants joined. The result is the same on every rank. A tenant whose stored recipe is
        refused is paused and left out."""
        said = b""
        if self._registry is not None:
            wanted: dict[str, Wanted] = {}
            for tenant in self._registry.tenants():
                if tenant.state not in ("queued", "running"):
                    continue
                waiting = self._registry.operations.waiting_tokens(tenant.incarnation)
                try:
                    tree = self._recipe_of(tenant)
                except WrongState:
                    continue  # a user has changed it in the meantime
                except InputError as error:
                    self._note(tenant.incarnation, "paused", str(error))
                    continue
                wanted[tenant.name] = Wanted(
                    tenant.incarnation, tenant.weight, tenant.loop, waiting, tree
                )
            said = json.dumps(wanted).encode()
        return {name: Wanted(*each) for name, each in json.loads(share_bytes(said)[0]).items()}

    def _recipe_of(self, tenant: Tenant) -> dict[str, object]:
        """Return the recipe of a tenant, or an empty dict if the tenant's run is open already.
        Raises InputError if the recipe is refused, and WrongState if the tenant was resumed or
        replaced meanwhile."""
        assert self._registry is not None
        if tenant.name in self._runs and self._opened[tenant.name] == tenant.incarnation:
            return {}
        recipe = self._registry.recipe(tenant.name).model_dump(mode="json")
        self._registry.require_same(tenant)  # the recipe is that of this incarnation
        return recipe

    def _open(self, name: str, wanted: Wanted) -> None:
        recipe, opened = Recipe.model_validate(wanted.tree), list[Run]()
        self._opened[name] = wanted.incarnation
        make = self._new_session if wanted.loop == "client" else self._new_run

        def open_run() -> None:
            opened.append(make(wanted.incarnation, wanted.weight, recipe))

        if failure := self._failure_of(name, open_run):
            for run in opened:
                _close(run)
            self._note(wanted.incarnation, "paused", failure)
            return
        (self._runs[name],) = opened
        self._queue.join(name, wanted.weight)
        self._note(wanted.incarnation, "running")

    def _train(self, name: str) -> None:
        """Train the tenant that the queue has chosen."""
        run, start = self._runs[name], time.perf_counter()
        failure = self._failure_of(name, run.train)
        if self._is_main:
            self._queue.done(time.perf_counter() - start)
        if failure:
            self._pause(run, failure)
        self._attempt(run, lambda: self._check_disk(run))

    def _check_disk(self, run: Run) -> None:
        """Raise DiskFailed if the run folder has grown beyond the tenant's limit. Only rank 0
        checks."""
        root, limit = run.folder.root, self._config.tenants.max_disk_bytes
        if limit is None or not self._is_main:
            return
        used = disk.bytes_below(root)  # while checkpoints are written and removed in the background
        if used > limit:
            raise DiskFailed(
                f"output_dir {root} holds {used} bytes, and the service allows "
                f"tenants.max_disk_bytes={limit}; remove old checkpoints, then resume the tenant"
            )

    def _next(self) -> str:
        """Return the name of the tenant to train next, as rank 0's queue chooses it; empty if no
        tenant is in line."""
        name = self._queue.take(time.monotonic()) if self._is_main else None
        return share_bytes((name or "").encode())[0].decode()

    def _finish(self, run: Run) -> None:
        if self._attempt(run, run.leave):
            self._note(self._opened[run.name], "done")
            self._forget(run.name)

    def _attempt(self, run: Run, action: Callable[[], object]) -> bool:
        """Call `action` for one tenant, and pause the tenant if the call fails on any rank. Return
        whether the call succeeded. If the tenant's run is not open any more, nothing is called, and
        the result is False."""
        if run.name not in self._runs:
            return False
        if failure := self._failure_of(run.name, action):
            self._pause(run, failure)
        return not failure

    def _failure_of(self, name: str, action: Callable[[], object]) -> str:
        """Call `action` for the tenant `name`. Return the error of the first rank on which it
        failed; empty if it succeeded on all ranks. Errors that end the service are raised."""
        failure = ""
        step = self._runs[name].step if name in self._runs else -1
        self._crashes.begin(self._opened[name], step)
        with working_for(name, step):
            try:
                action()
            except SERVICE_FAULTS:
                raise  # `_crashes` still names this tenant
            except (Exception, SystemExit) as error:
                if out_of_memory(error):
                    raise
                failure = describe(error)
            failure = self._consensus.first(failure, limit_s=consensus.ALONE_S)
        self._crashes.end()
        return failure

    def _pause(self, run: Run, reason: str) -> None:
        """Close a run that failed, and pause its tenant. If the tenant is resumed, the run
        continues from its newest checkpoint."""
        _close(run)
        self._forget(run.name)
        self._note(self._opened[run.name], "paused", reason)

    def _forget(self, name: str) -> None:
        self._runs.pop(name, None)
        self._queue.leave(name)
        self._crashes.forget(self._opened[name])

    def _note(self, incarnation: str, state: State, reason: str = "") -> None:
        """Write the new state of a tenant to the registry, unless a user has changed the tenant
        meanwhile. Does nothing on ranks other than 0."""
        if self._registry is not None:
            name = name_of(incarnation)
            is_moved = self._registry.try_move(incarnation, state, reason)
            if reason:
                is_now = "is paused" if is_moved else "was paused or removed, and had failed"
                console.warning(f"tenant {name} {is_now}: {reason}")
            if is_moved and (why := self._registry.kept.get(name)):
                console.warning(
                    f"the state of tenant {name} ({state}) is only in memory: {why}; it is written as "
                    "soon as that is possible, and lost if the service ends before"
                )

    def _write_kept(self) -> None:
        """Try again to write the states that could not be written to disk (see `Registry.kept`)."""
        if self._registry is not None:
            for name in self._registry.write_kept():
                console.warning(f"the state of tenant {name} is on the disk now")

    def _write_row(self, row: dict[str, float], times: dict[str, float]) -> None:
        """Write and publish a row of the service's metrics, on rank 0. The engines' metrics and the
        tenants' sequences are added to `row`. `times`: statistics of how full the engines were (see
        `GateTimes`), summed over all engines."""
        assert self._registry is not None
        names = {engine_name(each): name for name, each in self._opened.items()}
        row |= engine_metrics(of_names(times, names))
        for name, incarnation in self._opened.items():
            if any(key.startswith(f"service/{name}/") for key in row):
                row[f"service/{name}/sequence"] = float(sequence_of(incarnation))
        try:
            add_line(self._registry.root / "metrics.jsonl", row)
            self._loses_rows = False
        except OSError as error:
            if not self._loses_rows:  # warn only once
                why = disk.describe(error, self._registry.root)
                console.warning(f"{why}; rows are left out until there is room")
            self._loses_rows = True
        self._publish(row)


def _close(run: Run) -> None:
    """Close a run without saving. An error, which may be one of the tenant's code, is only reported,
    so that it ends neither the service nor the runs of other tenants."""
    try:
        run.close()
    except (Exception, SystemExit) as error:
        console.warning(f"the run of tenant {run.name} was closed with an error: {describe(error)}")
