"""A run with everything that a step keeps for the next one, and its second half once more."""

from __future__ import annotations

import shutil
from typing import Any

from parallel.checkpoint.saved_tensors import SavedTensors
from tests.loop.shared_engine import SharedEngine
from tests.loop.stepped import SteppedRun, supply_of

KEEPING = (
    "algorithm.name=ppo",
    "algorithm.kl_coef=0.05",
    "algorithm.kl_in=reward",
    "algorithm.kl_estimator=k1",
    "algorithm.kl_target=1e-4",
    "algorithm.kl_horizon=1000",
    "algorithm.dynamic_sampling=true",
    "rollout.dynamic_sampling_rounds=2",
    "critic.lr=5e-3",
    "optimizer.lr_warmup_steps=1",
    "optimizer.lr_decay_style=cosine",
    "optimizer.min_lr=1e-4",
    "critic.warmup_steps=1",
    "train.num_steps=3",
    "train.num_epochs_per_rollout=2",
    "train.num_steps_per_rollout=1",
    "checkpoint.async_save=false",
)
"""A critic that warms up, a coefficient that adapts, prompts drawn as they are needed."""


def saved_tensors(run: SteppedRun) -> dict[str, Any]:
    run._save()
    tensors = SavedTensors(run.folder.checkpoints / f"iter_{run.step:07d}")
    return {key: tensors[key] for key in tensors if not key.startswith("random.")}


def whole_and_resumed(engine: SharedEngine) -> dict[str, Any]:
    """Metrics of three steps, of the last again from a checkpoint, and what both end with."""
    whole = engine.run("whole", KEEPING)
    rows = [whole.run_step() for _ in range(2)]
    whole._save()
    kept = shutil.copytree(whole.folder.checkpoints, engine.scratch / "kept")
    rows.append(whole.run_step())
    resumed = engine.run("resumed", KEEPING, checkpoints=kept)
    assert resumed.step == 2
    again = [resumed.run_step()]
    return {
        "rows": rows,
        "again": again,
        "ends": [saved_tensors(run) for run in (whole, resumed)],
        "prompts": [
            supply_of(run.collector).cursor.state_dict()["offset"] for run in (whole, resumed)
        ],
    }
