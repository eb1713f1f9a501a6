"""A power cut after any fsync of a run costs no checkpoint that had its name, nor what it implies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.run.folder import RunFolder
from mrl.run.metric_rows import mend
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.manifest import candidates, damage, newest_good, step_of
from tests.loop.conftest import TOY_RECIPE
from tests.parallel.checkpoint.power_cut import Recorder
from tests.parallel.checkpoint.test_checkpoint_layouts import build
from tests.parallel.layouts import join_mesh
from tests.ranks import run_ranks

STEPS = 3
ROW = {"prompt": "1 + 1", "completion": "2", "reward": 1}


def runs(model_path: Path, disk: Path, kept: Path) -> list[int]:
    """Save three steps of a run; return how many had been saved at each cut."""
    mesh = join_mesh(model_path, {})
    policy = build(model_path, mesh)
    disk.mkdir()
    with Recorder(disk, kept) as recorder:
        folder = RunFolder(disk / "runs/one")
        given = [f"model.path={model_path}", f"output_dir={folder.root}"]
        folder.open(load_recipe(TOY_RECIPE, given))
        store = Checkpoints(folder.checkpoints, mesh, keep=2, record=folder)
        saved = [0] * len(recorder.cuts)
        for step in range(STEPS):
            folder.write_rollouts(step, [json.dumps(ROW).encode() + b"\n"])
            folder.add_metrics({"step": step})
            store.save(step + 1, policy, {"step": step + 1})
            saved += [step] * (len(recorder.cuts) - len(saved))
        recorder.cuts.append(recorder.after_cut())
        return [*saved, STEPS]


@pytest.mark.release
def test_a_power_cut_at_any_moment_costs_no_checkpoint_that_has_its_name(
    model_path: Path, tmp_path: Path
) -> None:
    args = model_path, tmp_path / "disk", tmp_path / "kept"
    (saved,) = run_ranks(1, runs, *args, folder=tmp_path / "out")
    cuts = sorted((tmp_path / "kept").iterdir())
    assert len(cuts) == len(saved) > 30
    for cut, promised in zip(cuts, saved, strict=True):
        folder = RunFolder(cut / "runs/one")
        found = newest_good(candidates(folder.checkpoints), damage, lambda text: None)
        step = 0 if found is None else step_of(found)
        assert promised <= step <= promised + 1, cut
        if found is None:
            continue
        assert load_recipe(folder.config).output_dir == str(tmp_path / "disk/runs/one")
        assert folder.history.read()[0]["event"] == "start"
        for done in range(step):
            assert folder.read_rollouts(done) == [ROW], cut
        mend(folder.metrics, found, step)
        assert [row["step"] for row in folder.read_metrics()][:step] == list(range(step)), cut
