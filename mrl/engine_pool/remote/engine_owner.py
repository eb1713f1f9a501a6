"""Starts and replaces the engine of a rollout rank, and describes how one worker uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.engine_pool.engine_nodes import make_engine
from mrl.engine_pool.restarts import IN_BATCH, Restarts
from mrl.engines.base import EngineLost, EngineServer, PolicyEndpoint
from mrl.errors import InputError, RunFailed
from mrl.preflight import Plan
from mrl.rewards.budget import Budget
from mrl.run.folder import RunFolder
from mrl.system.worker_user import WorkerUser
from parallel.mesh import local_device


@dataclass
class EngineOwner:
    """Starts, replaces and stops the engine of a rollout rank.

    In a service, the workers of all tenants share the engine. Each worker runs in its own thread
    and may be the first to notice that the engine is lost.
    """

    server: EngineServer
    number: int
    """The number of the engine in the run."""
    max_restarts: int
    """How many losses are allowed between two calls of `reset_losses`."""
    is_running: Callable[[], bool] = lambda: False
    """Returns whether the engine is running because another worker has replaced it already. Always
    False for an engine that only one worker uses."""
    has_culprit: Callable[[], bool] = lambda: False
    """Returns whether the engine was lost because of requests that ran alone in it
    (`mrl.engines.gate.Gate.has_culprit`). Always False for an engine that only one worker uses."""

    def __post_init__(self) -> None:
        self._restarts = Restarts(IN_BATCH, self.max_restarts, self.number)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the engine. Raises InputError and RunFailed."""
        self.server.start()

    def reset_losses(self) -> None:
        """Set the number of times that the engine was lost to 0.

        Call this after each finished batch. If the worker instead takes prompts one at a time (each
        under a lease, see `mrl.engine_pool.remote.lease_schedule`), call it after each finished
        sample group.
        """
        with self._lock:
            self._restarts.reset()

    def replace(self, error: EngineLost) -> int:
        """Start another engine, unless another worker has done so already. Return how many engines
        were started, which is 0 if another worker has replaced the engine.

        Raises EngineGone after more than `max_restarts` losses.
        """
        with self._lock:
            if self.is_running():
                return 0
            error.is_explained |= self.has_culprit()
            self._restarts.lost = error
            return self._restarts.replace(self.server.start)

    def stop(self) -> None:
        """Stop the engine. A second call does nothing."""
        with self._lock:
            self.server.stop()


@dataclass(frozen=True)
class WorkerEngine:
    """An engine, and how one worker uses it. The worker either has the engine to itself, or works for
    one of the tenants that share the engine."""

    owner: EngineOwner
    endpoint: PolicyEndpoint
    budget: Budget = field(default_factory=Budget)
    """Limits the time of rewards and environments in a step."""
    user: WorkerUser | None = None
    """The user as whom the processes of rewards and environments run; None is the user of this
    process."""
    reported_errors: tuple[type[Exception], ...] = (InputError, RunFailed)
    """Errors that the worker reports to the trainer. After any other error the supervisor starts
    another worker."""


def make_own_engine(plan: Plan, number: int) -> WorkerEngine:
    """Return engine `number` of a run that shares its engines with no other run. It is not
    started."""
    rollout, folder = plan.recipe.rollout, RunFolder(plan.recipe.output_dir)
    rank = number * rollout.tensor_parallel_size
    nodes = make_engine(plan, rank, local_device(), folder, lambda own: [own])
    assert nodes.server is not None
    assert nodes.endpoint is not None
    return WorkerEngine(EngineOwner(nodes.server, number, rollout.max_restarts), nodes.endpoint)
