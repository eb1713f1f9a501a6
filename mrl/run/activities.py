"""The activities of an engine in a disaggregated run, and how much engines and trainer are idle.

An engine is in exactly one activity at a time, so the seconds of its activities add up to the
wall-clock time. Metrics and timeline.jsonl use the names of the activities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BUSY = {
    "generate": "generates",
    "drain": "finishes what runs before newer weights",
    "evaluate": "evaluates",
}
"""Activities in which the engine generates, with their descriptions for the page of `mrl view`."""
IDLE = {
    "bound": "waits: the bound allows no more",
    "weights": "waits for weights",
    "score": "waits for rewards",
}
"""Activities in which the engine is idle, each named after its cause."""
UPKEEP = {
    "load": "loads and verifies weights",
    "start": "starts, or is replaced",
}
"""Activities in which the engine cannot generate."""
ACTIVITIES = BUSY | IDLE | UPKEEP
WAIT = "time/batch_wait_s"
"""Name of the metric that holds the seconds in which the trainer waited for engines."""


def seconds_key(activity: str) -> str:
    """Return the name of the metric that holds an activity's seconds, averaged over the engines."""
    return f"time/engine_{activity}_s"


def idle_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of a step's time (0 to 1) in which engines and trainer were idle.

    The keys are names of metrics. The share of the engines is NaN if no activity of an engine was
    recorded. The result is empty if `metrics` has no WAIT, as in a colocated run, where engines and
    trainer take turns.
    """
    if WAIT not in metrics:
        return {}
    seconds = {name: metrics.get(seconds_key(name), 0.0) for name in ACTIVITIES}
    whole, idle = sum(seconds.values()), sum(seconds[name] for name in IDLE)
    return {
        "async/rollout_idle_share": idle / whole if whole > 0 else math.nan,
        "async/trainer_idle_share": min(1.0, metrics[WAIT] / metrics["time/step_s"]),
    }


def main_cause(metrics: Mapping[str, float]) -> str:
    """Return the idle activity with the most seconds; empty if the engines were never idle."""
    cause = max(IDLE, key=lambda name: metrics.get(seconds_key(name), 0.0))
    return cause if metrics.get(seconds_key(cause), 0.0) > 0 else ""
