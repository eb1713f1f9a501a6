"""This module says what a tracker must do.

A tracker copies a run to a tracking service. It is told what metrics.jsonl holds, line by line, and
never asked for anything: one that fails is closed, and later another one starts where it failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mrl.config import LoggingConfig
from mrl.system.plugins import Kind, resolve

JSONL = "jsonl"
"""The name of metrics.jsonl, which the run folder writes, whether a recipe names it or not."""

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
    """A run, as a tracker knows it."""

    folder: Path
    """The run folder; a tracker that writes files makes a folder or file of its own there."""
    config: LoggingConfig
    recipe: Mapping[str, Any]
    """The resolved recipe, branch by branch."""

    @property
    def name(self) -> str:
        return self.config.name or self.folder.absolute().name


@dataclass(frozen=True)
class Started:
    """A `Started` is what a tracker knows after its start."""

    run_id: str
    """The id of the run in the service. It is kept in trackers.json, and given to the next start."""
    next_step: int
    """The first step that the service lacks: steps from here on are logged next."""


class Tracker(Protocol):
    """A file of mrl/trackers/ offers one as `Tracker`; it is built with a `Run`.

    All methods are called in one thread, in which a tracker may block. Any exception means that the
    step has not arrived: the tracker is closed, and built and started again later.
    """

    @staticmethod
    def packages(config: LoggingConfig) -> Sequence[str]:
        """Return the names of the packages, as they are imported, that this tracker needs."""
        ...

    def start(self, run_id: str | None, next_step: int) -> Started:
        """Create the run in the service, or continue the run `run_id`.

        Steps from `next_step` on will be logged. Where the service has some of them, from before a
        kill, they are of a history that was left and must not count any more.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Log the numbers of a step, which ended `time_s` seconds after 1970."""
        ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        """Log some samples of a step: rows of SAMPLE_COLUMNS. `log` follows for the same step."""
        ...

    def flush(self) -> None:
        """Return when a kill of this process would lose nothing of what was logged, where the service
        can promise that."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the run in the service, unless it has ended; `failed`: the run was not finished."""
        ...


SAMPLE_COLUMNS = (
    "prompt", "completion", "reward", "advantage", "response_len", "finish_reason",
)  # fmt: skip
"""The columns of a table of samples, which are those of rollouts/step_*.jsonl."""


def load_tracker(name: str) -> Any:
    """Return the class of a tracker. Raises InputError where there is none of this name."""
    return resolve(KIND, name)
