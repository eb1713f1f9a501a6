"""A run that leaves partial rollouts, dies, and continues: every prompt drawn is somewhere, once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrl.config import load_recipe
from mrl.data.cursor import PromptCursor
from mrl.preflight import check
from mrl.run.folder import RunFolder
from parallel import prepare
from parallel.mesh import init_mesh
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.loop.stepped import SteppedRun, supply_of
from tests.ranks import run_ranks


class Run(SteppedRun):
    def go(self, num_steps: int) -> list[dict[str, float]]:
        rows = [self.run_step() for _ in range(num_steps)]
        for row in rows:
            self.folder.add_metrics(row)
        return rows

    def save(self) -> None:
        self._save()
        self.checkpoints.finish()


def died_and_resumed(overrides: list[str]) -> dict[str, Any]:
    """Two steps, a checkpoint, a step that is lost, and two more by another trainer."""
    recipe = load_recipe(TOY_RECIPE, overrides)
    folder = RunFolder(recipe.output_dir)
    plan = check(recipe, 1)
    folder.open(recipe)
    prepare()
    mesh = init_mesh(plan.dims, recipe.seed)
    first = Run(plan, mesh, folder)
    engine = first.begin(None)
    try:
        first.go(2)
        first.save()
        saved = [one.group.prompt.prompt_id for one in supply_of(first.collector).backlog.waiting]
        first.go(1)
        second = Run(check(recipe, 1), mesh, folder)
        second.begin(engine)
        restored = [
            one.group.prompt.prompt_id for one in supply_of(second.collector).backlog.waiting
        ]
        second.go(2)
        return {
            "saved": saved,
            "restored": restored,
            "state": second.collector.state_dict(),
            "waiting": [
                one.group.prompt.prompt_id for one in supply_of(second.collector).backlog.waiting
            ],
            "order": [p.prompt_id for p in PromptCursor(plan.prompts, seed=recipe.seed).next(64)],
            "metrics": folder.read_metrics(),
        }
    finally:
        engine.stop()


@pytest.mark.release
@pytest.mark.timeout(400)
def test_a_run_with_a_backlog_dies_and_goes_on(toy: Toy, tmp_path: Path) -> None:
    overrides = toy.overrides(
        tmp_path / "run", "rollout.over_sampling=1.5", "rollout.partial_rollouts=resume",
        "algorithm.importance=tis", "rollout.max_response_len=48", "train.num_steps=4",
    )  # fmt: skip
    (found,) = run_ranks(1, died_and_resumed, overrides, folder=tmp_path / "out")
    assert len(found["saved"]) == 2  # six started, four trained on
    assert found["restored"] == found["saved"]
    folder = RunFolder(tmp_path / "run")
    trained = Counter(
        row["prompt_id"] for step in range(4) for row in folder.read_rollouts(step)
    )  # each prompt with its four samples
    assert set(trained.values()) == {4}
    drawn = found["order"][: found["state"]["offset"]]
    assert sorted([*trained, *found["waiting"]]) == sorted(drawn)
    rows = found["metrics"]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["rollout/backlog_prompts"] == 2
        assert row["weight_version"] == row["step"]
        assert 0.9 < row["importance/mean"] < 1.1
    assert rows[0]["rollout/off_policy_tokens"] == 0.0
    assert all(0 < row["rollout/off_policy_tokens"] < 1 for row in rows[1:])
