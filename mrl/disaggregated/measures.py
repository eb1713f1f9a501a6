"""This module adds up what workers measure, over the workers and over the rounds of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from mrl.disaggregated.work import Work
from mrl.types import SampleGroup

RESTARTS = "rollout/engine_restarts"
MEASURED = (
    RESTARTS, "time/recovery_s", "time/verify_s", "rollout/canary_abs_mean", "rollout/sync_bytes"
)  # fmt: skip
"""The metrics of workers."""


def add_worker(sums: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Take in what another worker has measured: restarts add up, of all else the largest counts."""
    for key, value in metrics.items():
        former, new = sums.get(key, 0.0), float(value)
        sums[key] = former + new if key == RESTARTS else max(former, new)


def add_round(step: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step with another round: times and restarts add up, of canaries the
    largest counts, and of all else the newest."""
    joined = {**step, **metrics}
    for key in step.keys() & metrics.keys():
        if key.startswith("time/") or key == RESTARTS:
            joined[key] = step[key] + metrics[key]
        elif key == "rollout/canary_abs_mean":
            joined[key] = max(step[key], metrics[key])
    return joined


def in_flight(
    newest: int, engines: Iterable[int | None], queue: Collection[int], works: Iterable[Work]
) -> dict[str, float]:
    """Return the numbers of `async/*` on groups and versions in flight.

    `newest` is the version of the trainer's weights, `engines` those of the engines (None: not loaded
    yet); `queue` has the oldest version of each finished group, `works` what is not delivered.
    """
    loaded = {version for version in engines if version is not None}
    counts = {
        "async/leased_groups": sum(work.num_wanted for work in works if work.kind == "batch"),
        "async/queued_groups": len(queue),
        "async/queue_age": newest + 1 - min(queue, default=newest + 1),
        "async/versions_in_flight": len(loaded.union(queue)),
        "async/engine_lag": newest - min(loaded, default=newest),
    }
    return {key: float(count) for key, count in counts.items()}


def oldest_versions(groups: Iterable[SampleGroup]) -> list[int]:
    """Return the version that sampled the oldest token of each group that has tokens."""
    spans = [[s.version for each in g.samples for s in each.weight_versions] for g in groups]
    return [min(versions) for versions in spans if versions]


def staleness(groups: Iterable[SampleGroup], step: int, max_staleness: int) -> dict[str, float]:
    """Return `async/staleness/*`: how many groups of a step have which staleness."""
    counts = Counter(dict.fromkeys(range(max_staleness + 1), 0))
    counts.update(step - version for version in oldest_versions(groups))
    return {f"async/staleness/{age}": float(count) for age, count in counts.items()}
