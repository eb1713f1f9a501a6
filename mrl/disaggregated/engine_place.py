"""The engine of a worker, and how another one is started where it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mrl.collect.engine_nodes import make_engine
from mrl.errors import EngineGone, InputError, RunFailed
from mrl.preflight import Plan
from mrl.rewards.budget import Budget
from mrl.rollout.base import EngineLost, RolloutEngine
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.worker_user import WorkerUser
from parallel.mesh import local_device


class EnginePlace(Protocol):
    """Holds the engine that a worker generates with."""

    number: int
    """That of the engine in the run."""
    budget: Budget
    """What rewards and environments may take in a step."""
    user: WorkerUser | None
    """Whom their processes belong to; None for the user of this one."""
    reported: tuple[type[Exception], ...]
    """Errors of the work that the trainer is told; after others another worker tries again."""

    @property
    def engine(self) -> RolloutEngine: ...

    def start(self) -> None:
        """Start the engine. Raises InputError and RunFailed."""
        ...

    def begin_batch(self) -> None:
        """Reset the count of losses after a finished batch, or a finished group of a free engine."""
        ...

    def replace(self, error: EngineLost) -> int:
        """Start another engine in the place of a lost one; return how many it took. Raises EngineGone
        after too many in one batch."""
        ...

    def stop(self) -> None:
        """Let go of the engine. Harmless when repeated."""
        ...


class Restarts:
    """Starts engines until one runs, and counts them."""

    def __init__(self, number: int, max_restarts: int) -> None:
        self._number, self._most, self._count = number, max_restarts, 0

    def begin_batch(self) -> None:
        """Count from 0 again."""
        self._count = 0

    def start_another(self, start: Callable[[], None], error: EngineLost) -> int:
        """Start an engine by `start`; return how many starts it took. A loss that `is_explained` is not
        counted, because the requests that caused it are not tried again.

        Raises EngineGone after too many."""
        num_starts = 0
        while True:
            num_starts += 1
            self._count += not error.is_explained
            if self._count > self._most:
                raise EngineGone(
                    f"{self._count} engines were lost in one batch, more than "
                    f"rollout.max_restarts={self._most}; {error}"
                ) from None
            console.warning(f"{error}")
            console.warning(f"rollout engine {self._number}: starting another one")
            try:
                start()
            except InputError:
                raise
            except RuntimeError as again:
                error = again if isinstance(again, EngineLost) else EngineLost(str(again))
            else:
                return num_starts


class OwnEngine:
    """The engine of a worker that has it to itself. See `EnginePlace`."""

    reported: tuple[type[Exception], ...] = (InputError, RunFailed)
    user: WorkerUser | None = None

    def __init__(self, plan: Plan, number: int) -> None:
        rollout, folder = plan.recipe.rollout, RunFolder(plan.recipe.output_dir)
        rank = number * rollout.tensor_parallel_size
        nodes = make_engine(plan, rank, local_device(), folder, lambda said: [said])
        assert nodes.engine is not None
        self.number, self.engine, self.budget = number, nodes.engine, Budget()
        self._restarts = Restarts(number, rollout.max_restarts)

    def start(self) -> None:
        self.engine.start()

    def begin_batch(self) -> None:
        self._restarts.begin_batch()

    def replace(self, error: EngineLost) -> int:
        return self._restarts.start_another(self.engine.start, error)

    def stop(self) -> None:
        self.engine.stop()
