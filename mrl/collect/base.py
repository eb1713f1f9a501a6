"""What a source of scored sample groups must do: live.py asks an engine, saved.py reads files.

Both give every rank the same groups in the same order, so that
everything after is the same on every rank and independent of how many engines there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mrl.system.clock import Clock
from mrl.types import SampleGroup, Statistics
from parallel.policy import Policy


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
