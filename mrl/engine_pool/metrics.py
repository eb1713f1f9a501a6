"""Engine metrics that are not computed from completions.

To add a metric, add a field to `EngineMetrics`, set it where it is measured, and add a row to
docs/metrics.md.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

Rule = Callable[[float, float], float]
"""Combines two values of a metric: an earlier and a later value, or the values of two workers."""


def _newer(earlier: float, later: float) -> float:
    return later


def _metric(key: str, *, rounds: Rule, workers: Rule = max) -> Any:
    return field(default=0.0, metadata={"key": key, "rounds": rounds, "workers": workers})


@dataclass
class EngineMetrics:
    """Measurements of one engine in a step, or of all engines together.

    `_metric` gives each field its metric key and two rules: `rounds` combines the values of a
    step's rounds of generation, and `workers` those of different workers.
    """

    num_restarts: float = _metric(
        "rollout/engine_restarts", rounds=operator.add, workers=operator.add
    )
    recovery_s: float = _metric("time/recovery_s", rounds=operator.add)
    """Seconds that the replacement of lost engines took."""
    verify_s: float = _metric("time/verify_s", rounds=operator.add)
    """Seconds that weight syncs spent on two checks: digests of the weights, and canaries (token
    sequences whose log-probs the engine must reproduce)."""
    canary_abs_mean: float = _metric("rollout/canary_abs_mean", rounds=max)
    """The mean absolute difference between the engine's and the trainer's log-probs of the canaries
    (see `verify_s`). With several weight syncs, the maximum of their means."""
    sync_bytes: float = _metric("rollout/sync_bytes", rounds=_newer)
    """Size of the newest weight sync in bytes."""

    def __post_init__(self) -> None:
        self._last_sync_bytes = self.sync_bytes

    def reset(self) -> None:
        """Set all values to zero except `sync_bytes`, which is kept because a step may have no
        weight sync of its own."""
        for each in fields(self):
            if each.name != "sync_bytes":
                setattr(self, each.name, 0.0)

    def take(self) -> EngineMetrics:
        """Return a copy of these values, and reset them. A step in which no engine reports has the
        `sync_bytes` of the step before."""
        taken = replace(self, sync_bytes=self.sync_bytes or self._last_sync_bytes)
        self._last_sync_bytes = taken.sync_bytes
        self.reset()
        self.sync_bytes = 0.0
        return taken

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Add the duration of the block to `recovery_s`, unless the block raises."""
        begin = time.perf_counter()
        yield
        self.recovery_s += time.perf_counter() - begin

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Add the duration of the block to `verify_s`, unless the block raises."""
        begin = time.perf_counter()
        yield
        self.verify_s += time.perf_counter() - begin

    def as_dict(self) -> dict[str, float]:
        """Return the values by metric key."""
        return {each.metadata["key"]: float(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> EngineMetrics:
        """Return the metrics with the given values, by metric key, as returned by `as_dict`. The
        value of a missing key is 0."""
        return cls(*(float(values.get(each.metadata["key"], 0.0)) for each in fields(cls)))

    def add_worker(self, other: EngineMetrics) -> None:
        """Update these values: combine each with the value of another worker, by the `workers` rule
        of the field."""
        for each in fields(self):
            rule: Rule = each.metadata["workers"]
            setattr(self, each.name, rule(getattr(self, each.name), getattr(other, each.name)))


def join_rounds(step: Mapping[str, float], later: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step, by metric key, combined with those of a later round.

    The metrics in `EngineMetrics` are combined by their `rounds` rule. Other `time/` metrics are
    added up. For all other metrics the later value replaces the earlier value.
    """
    rules = {each.metadata["key"]: each.metadata["rounds"] for each in fields(EngineMetrics)}
    joined = {**step, **later}
    for key in step.keys() & later.keys():
        rule: Rule = rules.get(key, operator.add if key.startswith("time/") else _newer)
        joined[key] = rule(step[key], later[key])
    return joined
