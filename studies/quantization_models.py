"""This module says which models `studies.quantization` compares.

`toy` is the MoE of the stability study. `smollm` is SmolLM2-135M-Instruct (`make smollm` makes its
folder), dense and as a MoE.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mrl.quantization import SCHEMES
from studies.stability_study.arms import CORRECTIONS, RECIPE, ROOT

SMOLLM_RECIPE = ROOT / "launch/recipes/smollm.yaml"
SMOLLM = ROOT / "runs/smollm"
UPCYCLE = ("--experts", "4", "--top-k", "2", "--noise", "0.1", "--no-check")
"""Without noise all experts would be copies, and it would not matter which of them a router chooses."""
_SHORT = (
    *("algorithm.name=grpo", "rollout.dtype=bfloat16", "rollout.canary_prompts=0"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4"),
    *("eval.every=0", "eval.sets=[]", "checkpoint.save_every=0", "diagnosis.decompose_every=0"),
)


@dataclass(frozen=True)
class Model:
    name: str
    recipe: Path
    arms: tuple[str, ...]
    """The corrections of `stability_study.arms.CORRECTIONS`; a dense model has no routes to replay."""
    keys: tuple[str, ...] = ()
    """Overrides of the recipe."""
    is_moe: bool = True


@dataclass(frozen=True)
class Study:
    """What `--model` names: models, and the defaults of the other arguments."""

    models: tuple[Model, ...]
    formats: tuple[str, ...]
    num_seeds: int
    num_steps: int
    num_workers: int
    """How many runs go on at a time; a single one has all cores."""
    figures: dict[str, str]
    """Columns of the table: figures of `stability_study.report.FIGURES`, and their headings."""
    result: str
    """The name of the result file."""
    marker: str
    """The name of the markers in docs/quantization.md."""


_FIGURES = {
    "native_k3": "k3, trainer's own routes",
    "replayed_k3": "k3, engine's routes",
    "disagreement": "router disagreement",
}
STUDIES = {
    "toy": Study(
        (Model("toy", RECIPE, tuple(CORRECTIONS)),),
        ("none", *SCHEMES),
        num_seeds=5,
        num_steps=10,
        num_workers=2,
        figures={**_FIGURES, "mismatch_extreme": "extreme tokens", "reward_final": "final reward"},
        result="quantization",
        marker="study",
    ),
    "smollm": Study(
        (
            Model("dense", SMOLLM_RECIPE, ("off", "TIS"), _SHORT, is_moe=False),
            Model(
                "MoE",
                SMOLLM_RECIPE,
                tuple(CORRECTIONS),
                (*_SHORT, "train.micro_batch_tokens=2048"),  # its weights take most of the memory
            ),
        ),
        ("none", "fp8_block"),
        num_seeds=2,
        num_steps=4,
        num_workers=1,
        figures={**_FIGURES, "native_extreme": "extreme tokens", "reward_mean": "mean reward"},
        result="quantization_smollm",
        marker="real",
    ),
}


def start_of(model: Model, folder: Path) -> Path:
    """Return the folder of the model that a run of SmolLM2 starts from. The MoE is made in `folder`
    unless it is there."""
    dense = SMOLLM / "dense"
    if not (dense / "config.json").is_file():
        sys.exit(f"error: there is no {dense.relative_to(ROOT)}; make it with `make smollm` first")
    if not model.is_moe:
        return dense
    moe = folder / "start"
    if not (moe / "mrl_upcycle.json").is_file():
        print("making the start: a MoE out of the dense model", flush=True)
        words = ("upcycle", str(dense), str(moe), *UPCYCLE)
        with (folder / "start.log").open("w") as log:
            command = [sys.executable, "-W", "ignore", "-m", "mrl", *words]
            subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)
    return moe
