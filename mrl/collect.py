"""What gives a step its scored groups, and the rollouts that another run saved as one such source.

engine_collector.py is the other. Both give every rank the same groups in the same order, so that
everything after is the same on every rank and independent of how many engines there were.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mrl.errors import InputError
from mrl.rollout.saved import load_groups, outline
from mrl.run_folder import saved_step
from mrl.types import SampleGroup, Statistics
from parallel.groups import Groups
from parallel.policy import Policy


@dataclass
class Clock:
    """Wall-clock seconds of the parts of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass
class SyncCount:
    """Of a step's syncs and rounds."""

    restarts: int = 0
    recovery_s: float = 0.0
    canary: float = 0.0
    verify_s: float = 0.0
    """What digests and canaries took, within `time/sync_s`."""

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/engine_restarts": float(self.restarts),
            "rollout/canary_abs_mean": self.canary,
            "time/recovery_s": self.recovery_s,
            "time/verify_s": self.verify_s,
        }


class Collector(Protocol):
    """Gives a step's scored groups; every method is called on all ranks."""

    start_text: str
    """What `start` does, for the terminal."""

    def start(self, policy: Policy) -> None:
        """Make ready; may take long. The policy is as it was afterwards."""
        ...

    def collect(self, step: int, policy: Policy, clock: Clock) -> list[SampleGroup]:
        """Groups in prompt order with rewards; times `sync`, `rollout` and `score`."""
        ...

    def evaluate(self, version: int, policy: Policy, clock: Clock) -> dict[str, float]:
        """`eval/*` of the policy's present weights, on the recipe's evaluation sets."""
        ...

    def statistics(self) -> Statistics:
        """This rank's share of what the last collect() measured, the same keys on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able, on rank 0: what a resumed run needs to go on with the next prompts."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Leave no process behind. Safe to call twice, and after a failure."""
        ...


class SavedCollector:
    """The groups of `debug.load_rollouts`, step by step; no engine and no reward function.

    Each rank keeps some groups whole, as if it had rolled them out, and of the others the outlines.
    """

    start_text = "opening the saved rollouts"

    def __init__(self, folder: str, groups: Groups) -> None:
        self.folder, self.groups = folder, groups

    def start(self, policy: Policy) -> None:
        """Nothing to make ready."""

    def collect(self, step: int, policy: Policy, clock: Clock) -> list[SampleGroup]:
        with clock.part("sync"), clock.part("score"), clock.part("rollout"):
            everything = load_groups(saved_step(self.folder, step))
            rank, world = self.groups.rank, self.groups.dims.world
            return [
                group if i % world == rank else outline(group) for i, group in enumerate(everything)
            ]

    def evaluate(self, version: int, policy: Policy, clock: Clock) -> dict[str, float]:
        raise InputError(
            "evaluation: debug.load_rollouts starts no engine; leave it out to evaluate"
        )

    def statistics(self) -> Statistics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The step number says it all."""

    def close(self) -> None:
        """Nothing is held."""
