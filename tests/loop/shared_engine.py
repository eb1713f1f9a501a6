"""Runs of the toy task in one process, one after the other, all with one engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from mrl.config import load_recipe
from mrl.engines.base import RolloutEngine
from mrl.preflight import check
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model
from parallel import prepare
from parallel.mesh import Mesh, init_mesh
from tests.loop.stepped import SteppedRun

RECIPE = Path(__file__).parents[2] / "launch/recipes/toy_moe.yaml"
SMALL = (
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=8",
    "rollout.max_response_len=8",
    "rollout.min_response_len=0",
    "rollout.canary_prompts=0",
    "train.num_steps_per_rollout=2",
    "optimizer.lr=5e-3",
    "checkpoint.save_every=0",
    "diagnosis.save_tokens_every=0",
    "diagnosis.decompose_every=0",
)
"""8 prompts x 8 samples x up to 8 letters, and two updates a rollout: in the second one the policy has
moved, so that ratios and clips count."""


class SharedEngine:
    """Starts with the first run; `stop` it."""

    def __init__(self, scratch: Path) -> None:
        write_toy_model(scratch / "model", num_layers=2)
        prepare()
        self.scratch = scratch
        self._mesh: Mesh | None = None
        self._engine: RolloutEngine | None = None

    def run(
        self, name: str, overrides: Sequence[str], checkpoints: Path | None = None
    ) -> SteppedRun:
        """A run in the folder `name`, at its start or after the newest of `checkpoints`."""
        places = [f"model.path={self.scratch / 'model'}", f"output_dir={self.scratch / name}"]
        recipe = load_recipe(RECIPE, [*places, *SMALL, *overrides])
        folder = RunFolder(recipe.output_dir)
        if checkpoints is not None:
            shutil.copytree(checkpoints, folder.checkpoints)
        plan = check(recipe, 1)
        folder.open(recipe)
        self._mesh = self._mesh or init_mesh(plan.dims, recipe.seed)
        run = SteppedRun(plan, self._mesh, folder)
        self._engine = run.begin(self._engine)
        return run

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
