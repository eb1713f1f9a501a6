"""This module names what an engine of a disaggregated run does at any time, and gives idle shares.

A worker is in exactly one activity at a time, so the seconds of all of them add up to the wall-clock
time. The keys are in metrics.jsonl and in timeline.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BUSY = {
    "generate": "generates",
    "drain": "finishes what runs before newer weights",
    "evaluate": "evaluates",
}
"""Activities in which the engine generates, with what the page and the terminal say of them."""
IDLE = {
    "bound": "waits: the bound allows no more",
    "weights": "waits for weights",
    "score": "waits for rewards",
}
"""Activities in which the engine has nothing to do, by the cause."""
UPKEEP = {
    "load": "loads and verifies weights",
    "start": "starts, or is replaced",
}
"""Activities in which the engine cannot generate."""
ACTIVITIES = BUSY | IDLE | UPKEEP
WAIT = "time/batch_wait_s"
"""The seconds that the trainer waited for engines."""


def seconds_key(activity: str) -> str:
    """Return the metric with the seconds of an activity, a mean over engines."""
    return f"time/engine_{activity}_s"


def idle_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the idle share of each role in a step; nothing where engines and trainer take turns."""
    if WAIT not in metrics:
        return {}
    seconds = {name: metrics.get(seconds_key(name), 0.0) for name in ACTIVITIES}
    whole, idle = sum(seconds.values()), sum(seconds[name] for name in IDLE)
    return {
        "async/rollout_idle_share": idle / whole if whole > 0 else math.nan,
        "async/trainer_idle_share": min(1.0, metrics[WAIT] / metrics["time/step_s"]),
    }


def main_cause(metrics: Mapping[str, float]) -> str:
    """Return the activity in which the engines were idle for the longest; empty where they were not."""
    cause = max(IDLE, key=lambda name: metrics.get(seconds_key(name), 0.0))
    return cause if metrics.get(seconds_key(cause), 0.0) > 0 else ""
