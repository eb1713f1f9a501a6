"""This module says what the collapse study compares, and on which models. It imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.stability_study.arms import ROOT, Job

PLUGIN = Path(__file__).parent / "plugin"
"""The folder of the engine's plug-in, for PYTHONPATH."""
ARMS: dict[str, list[str]] = {
    "GRPO": ["moe.routing_replay=off"],
    "GRPO+TIS": ["moe.routing_replay=off", "algorithm.importance=tis"],
    "GRPO+MIS": ["moe.routing_replay=off", "algorithm.importance=mis"],
    "GRPO+RS": ["moe.routing_replay=off", "algorithm.router_shift_floor=0.8"],
    "GSPO": ["moe.routing_replay=off", "algorithm.name=gspo"],
    "R3": ["moe.routing_replay=r3"],
    "R3+GSPO": ["moe.routing_replay=r3", "algorithm.name=gspo"],
}
"""Overrides of the recipe. `RS` is the router-shift weight of RSPO."""
BASE = "GRPO"
"""The arm that is said to collapse; it is also run without a disturbance, as the control."""
COLORS = {"GRPO": "#c0392b", "GRPO+TIS": "#e08e0b", "GRPO+MIS": "#8e44ad", "GRPO+RS": "#2c3e50",
          "GSPO": "#6b705c", "R3": "#1f78b4", "R3+GSPO": "#1b9e77"}  # fmt: skip
TOLERANCE = 0.05
"""How far, as a share of it, the measured rate may be from the one that was asked for."""


@dataclass(frozen=True)
class Model:
    """A model of the study, and what is run on it."""

    name: str
    recipe: Path
    arms: tuple[str, ...]
    rates: tuple[float, ...]
    """Shares of the choices (token, layer, expert) that differ between engine and trainer."""
    has_control: bool
    num_seeds: int
    num_steps: int
    num_workers: int
    """How many runs go on at a time; a single one has all cores."""
    run_timeout_s: float
    result: str
    """The name of the result file."""
    keys: tuple[str, ...] = ()
    """Overrides of the recipe."""


SHAPE: dict[str, Any] = {"num_layers": 16, "num_experts": 64, "num_experts_per_tok": 8}
"""Of the toy: arguments of `mrl.toy_model.write_toy_model`; the others keep their defaults."""
UPCYCLE = ("--experts", "4", "--top-k", "2", "--noise", "0.1", "--no-check")
"""Of SmolLM2. Without noise all experts would be copies, and their gradients, too."""
SFT = ("num_steps: 20", "batch_size: 8", "lr: 1.0e-4")
"""The supervised steps that train SmolLM2's experts apart."""
SMOLLM = ROOT / "runs/smollm"
MODELS = {
    "toy": Model(
        "toy",
        ROOT / "launch/recipes/collapse.yaml",
        tuple(ARMS),
        (0.01, 0.03, 0.10),
        has_control=True,
        num_seeds=5,
        num_steps=50,
        num_workers=2,
        run_timeout_s=7200.0,
        result="collapse",
    ),
    "smollm": Model(
        "smollm",
        ROOT / "launch/recipes/smollm.yaml",
        ("GRPO", "R3", "GSPO"),
        (0.10,),
        has_control=False,
        num_seeds=2,
        num_steps=40,
        num_workers=1,
        run_timeout_s=6 * 3600.0,
        result="collapse_smollm",
        keys=(
            *("algorithm.name=grpo", "rollout.canary_prompts=0", "train.num_steps_per_rollout=4"),
            *("train.micro_batch_tokens=2048", "rollout.samples_per_prompt=4"),
            *("eval.every=0", "eval.sets=[]", "checkpoint.save_every=0"),
            *("diagnosis.decompose_every=0", "diagnosis.save_tokens_every=0"),
        ),
    ),
}


@dataclass(frozen=True)
class Case:
    """What tells one run of a model from another."""

    arm: str
    rate: float
    """0 for the control."""
    seed: int

    def job(self, model: Model, folder: Path, num_steps: int, noise: float) -> Job:
        """Return the job of this run in the folder of the study; `noise` is the scale of `rate`."""
        name = f"{self.arm}_{100 * self.rate:g}_{self.seed}"
        return Job(
            self.arm,
            self.seed,
            num_steps,
            str(folder / "start"),
            str(folder / "runs" / name),
            (*model.keys, *ARMS[self.arm]),
            str(model.recipe),
            columns={"rate": self.rate},
            router_noise=noise,
        )


def cases(model: Model, num_seeds: int) -> list[Case]:
    """Return all runs in their order: the largest rate with the control, then the others.

    Within a rate they go seed after seed, so that an interrupted study has all arms of the first ones.
    """
    rates = sorted(model.rates)[::-1]
    return [
        case
        for rate in rates
        for seed in range(num_seeds)
        for case in (
            *([Case(BASE, 0.0, seed)] if model.has_control and rate == rates[0] else []),
            *(Case(arm, rate, seed) for arm in model.arms),
        )
    ]
