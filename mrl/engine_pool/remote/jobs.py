"""What a worker does for a work item, in jobs. Each job generates on the engine, and goes on with
another one if that is lost.

`RecipeJobs` are those of a recipe: batches and evaluations, whose samples are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mrl.collect.task import EngineTasks, Task
from mrl.engine_pool.remote.messages import Delivered, Work
from mrl.engines.base import PolicyEndpoint


class Job(Protocol):
    """A part of a work item."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do on the engine."""
        ...

    def run(self, endpoint: PolicyEndpoint) -> None:
        """Do on the engine what is left. Raises EngineLost if the engine is lost."""
        ...

    def finish(self) -> Delivered:
        """Return what the job has found, once it is over."""
        ...


class Jobs(Protocol):
    """Makes the jobs of a worker. It may own processes that the jobs use."""

    def of(self, work: Work) -> Sequence[Job]:
        """Return the jobs of a work item, in the order of its parts."""
        ...

    def close(self) -> None:
        """Release everything. Harmless when repeated."""
        ...


@dataclass(frozen=True)
class _RecipeJob:
    """A batch, or an evaluation set."""

    task: Task
    keeps_partial: bool
    """Whether incomplete groups are delivered, too."""

    @property
    def is_over(self) -> bool:
        return self.task.is_over

    def run(self, endpoint: PolicyEndpoint) -> None:
        self.task.run(endpoint)

    def finish(self) -> Delivered:
        groups, num_failed = self.task.finish()
        return Delivered(groups, num_failed, self.task.partial if self.keeps_partial else [])


@dataclass(frozen=True)
class RecipeJobs:
    """The jobs of a recipe. It implements `Jobs`."""

    tasks: EngineTasks

    def of(self, work: Work) -> Sequence[Job]:
        if work.kind == "evaluation":
            tasks = self.tasks.of_evaluation(work.part, work.num_parts)
            return [_RecipeJob(task, keeps_partial=False) for task in tasks]
        task = self.tasks.of_step(work.started, work.num_wanted)
        return [_RecipeJob(task, keeps_partial=True)]

    def close(self) -> None:
        self.tasks.close()
