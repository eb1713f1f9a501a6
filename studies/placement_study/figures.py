"""This module computes the figures of one run from its metrics: pure functions of their rows.

Legend: a *part* of a step is what the plan's formula takes (`mrl/planner/placement.py`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from mrl.run.activities import ACTIVITIES, IDLE, WAIT, seconds_key

NUM_LAST = 5
"""Steps whose mean is the reward at the end."""
WINDOW = 3
"""Steps that a smoothed reward is the mean of."""
Row = dict[str, Any]


def figures(rows: Sequence[Row], skipped: int, num_samples: int) -> dict[str, Any]:
    """Return the figures of a run whose first `skipped` steps no timing counts.

    `skipped` is at least 1; `num_samples` are those of one step. Idle shares and parts are missing
    where engines and trainer take turns on the same cores. Seconds of the curve count from the begin
    of the first step.
    """
    counted, before = rows[skipped:], rows[skipped - 1]
    seconds = counted[-1]["time/timestamp"] - before["time/timestamp"]
    begin = rows[0]["time/timestamp"] - rows[0]["time/step_s"]
    rewards = [float(row["reward/mean"]) for row in rows]
    found: dict[str, Any] = {
        "steps_per_s": len(counted) / seconds,
        "samples_per_s": num_samples * len(counted) / seconds,
        "tokens_per_s": sum(row["tokens/rollout"] for row in counted) / seconds,
        "reward_end": statistics.fmean(rewards[-NUM_LAST:]),
        "staleness_mean": mean(counted, "staleness/mean"),
        "staleness_max": max(row["staleness/max"] for row in rows),
        "curve": {
            "seconds": [round(row["time/timestamp"] - begin, 2) for row in rows],
            "reward": [round(reward, 4) for reward in rewards],
        },
    }
    if WAIT in counted[0]:
        found |= roles(counted, seconds)
    return found


def mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(float(row[key]) for row in rows)


def roles(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """Return the idle share of each role over steps that took `seconds` in all, and the mean seconds of
    an engine's activities and of the step's parts.

    Of metrics without the engines' activities, the loading of weights counts as generation, and the
    idle share of the rollout is missing.
    """
    keys = {name: seconds_key(name) for name in ACTIVITIES if seconds_key(name) in rows[0]}
    engine = {name: mean(rows, key) for name, key in keys.items()}
    load_s = engine.get("load", 0.0)
    step_s, wait_s, sync_s = seconds / len(rows), mean(rows, WAIT), mean(rows, "time/sync_s")
    parts = {
        "generate_s": max(0.0, wait_s - load_s),
        "train_s": max(0.0, step_s - sync_s - wait_s),
        "sync_s": sync_s,
        "load_s": load_s,
    }
    shares = {"trainer_idle": min(1.0, wait_s / step_s)}
    if engine:
        shares["rollout_idle"] = sum(engine[name] for name in IDLE) / sum(engine.values())
    return {
        **shares,
        "engine_s": {name: round(value, 4) for name, value in engine.items()},
        "parts": {name: round(value, 4) for name, value in parts.items()},
    }


def answer_lengths(lines: Sequence[Row]) -> list[int]:
    """Return the longest answer of each group of a step, in tokens, from its lines in rollouts/."""
    longest: dict[str, int] = defaultdict(int)
    for line in lines:
        longest[line["prompt_id"]] = max(longest[line["prompt_id"]], line["response_len"])
    return list(longest.values())


def spread(lengths: Iterable[Sequence[int]]) -> float:
    """Return the longest answer of the slowest group over that of the mean group: a mean over steps."""
    return statistics.fmean(max(step) / max(statistics.fmean(step), 1e-9) for step in lengths)


def smoothed(rewards: Sequence[float]) -> list[float]:
    """Return means of WINDOW consecutive rewards."""
    return [statistics.fmean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]


def steps_to(rewards: Sequence[float], target: float) -> int | None:
    """Return after how many steps the smoothed reward has reached `target`; None where it never did."""
    for i, reward in enumerate(smoothed(rewards)):
        if reward >= target:
            return i + WINDOW
    return None
