"""The interface of a tracker.

A tracker copies a run to a tracking service. It receives the lines of metrics.jsonl one by one. A
tracker that fails is closed, and later a new tracker continues with the step that failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mrl.config import LoggingConfig
from mrl.system.plugins import Kind, resolve

JSONL = "jsonl"
"""The name that stands for metrics.jsonl in `logging.trackers`. The file is written even if the
recipe does not list this name."""

KIND = Kind(
    noun="logging.trackers",
    package="mrl.trackers",
    not_plugins=frozenset({"__init__", "base", "check", "follower", "trackers"}),
    attributes=("Tracker",),
    form="class",
    example="Tracker",
)


@dataclass(frozen=True)
class Run:
    """What a tracker needs to know about a run."""

    folder: Path
    """The run folder. A tracker that writes files makes its own folder or file in it."""
    config: LoggingConfig
    recipe: Mapping[str, Any]
    """The run's recipe with overrides and default values, as nested dicts."""

    @property
    def name(self) -> str:
        return self.config.name or self.folder.absolute().name


@dataclass(frozen=True)
class Started:
    """The result of starting a tracker."""

    run_id: str
    """The id of the run in the service. The id is kept in trackers.json and passed to `start` when
    the tracker is started again."""
    next_step: int
    """The first step that the service does not have yet. Logging continues with this step."""


class Tracker(Protocol):
    """A tracking service, implemented by the class `Tracker` in a file of mrl/trackers/.

    The class is called with a `Run`. All methods are called in one thread, in which they may block.
    Any exception means that the step was not logged: the tracker is closed, and later it is built
    and started again.
    """

    @staticmethod
    def packages(config: LoggingConfig) -> Sequence[str]:
        """Return the import names of the packages that this tracker needs."""
        ...

    def start(self, run_id: str | None, next_step: int) -> Started:
        """Create the run in the service, or continue the run `run_id` if it is not None.

        Steps from `next_step` on will be logged. The service may already have some of these steps,
        if they were logged before the run was killed and resumed. Those earlier values must no
        longer count.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Log the numbers of a step. `time_s` is the end of the step, in seconds since 1970."""
        ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        """Log some samples of a step. Afterwards, `log` is called for the same step.

        rows: one mapping per sample, with the keys SAMPLE_COLUMNS. time_s: the end of the step, in
        seconds since 1970.
        """
        ...

    def flush(self) -> None:
        """Wait until all logged data is safe even if this process is killed.

        Returns at once if the service cannot guarantee that.
        """
        ...

    def close(self, *, failed: bool) -> None:
        """End the run in the service, unless it was not started or has already ended.

        failed: whether the run stopped before its last step.
        """
        ...


SAMPLE_COLUMNS = (
    "prompt", "completion", "reward", "advantage", "response_len", "finish_reason",
)  # fmt: skip
"""The columns of a table of samples, named as in rollouts/step_*.jsonl."""


def load_tracker(name: str) -> Any:
    """Return the class of a tracker. Raises InputError if there is no tracker of this name."""
    return resolve(KIND, name)
