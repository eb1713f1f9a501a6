"""What the run folder holds of a step."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.config.load import load_recipe
from mrl.errors import InputError
from mrl.jobs.train import train
from mrl.run.changes import Change, Kind, check_allowed
from mrl.run.folder import RunFolder, rollout_lines
from mrl.service.sessions.run import SessionRun
from mrl.service.tenant_run import TenantRun
from mrl.types import VersionSpan
from tests.sample_groups import PROMPT_LEN, group, sample


def test_the_record_of_a_sample_says_how_old_its_oldest_token_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    spans = (VersionSpan(3, PROMPT_LEN, 4), VersionSpan(5, 4, 8))
    resumed = dataclasses.replace(sample(6), weight_versions=spans)
    one = group([0.0, 1.0], 0, resumed, dataclasses.replace(resumed, weight_versions=spans[1:]))
    folder.write_rollouts(5, [rollout_lines(5, one, ["a", "b"])])
    rows = folder.read_rollouts(5)
    assert [row["weight_version"] for row in rows] == [5, 5]
    assert [row["staleness"] for row in rows] == [2, 0]


def test_a_start_looks_for_a_checkpoint_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a folder is looked at while another job writes to it: what was found could be old."""
    recipe = load_recipe("launch/recipes/toy_moe.yaml", [f"output_dir={tmp_path}"])
    looked: list[str] = []

    def check(*_: Any, **__: Any) -> None:
        looked.append("check")
        raise InputError("looked")

    monkeypatch.setattr("mrl.preflight.check", check)
    monkeypatch.setattr("mrl.service.tenant_run.check", check)
    monkeypatch.setattr("mrl.service.sessions.run.check_adapter", check)
    monkeypatch.setattr("mrl.service.sessions.run.check_session", lambda recipe: None)
    monkeypatch.setattr("mrl.service.sessions.run.check_lora", lambda *_: "an adapter")
    monkeypatch.setattr("mrl.service.sessions.run.HfModel.read", lambda *_: None)
    house: Any = SimpleNamespace(
        config=SimpleNamespace(tenants=SimpleNamespace(reward_user=None)),
        mesh=SimpleNamespace(rank=0),
        engines=SimpleNamespace(world=1),
    )
    starts = {
        "train": lambda: train(recipe, 1),
        "tenant": lambda: TenantRun("1-0-a", 1.0, recipe, house),
        "session": lambda: SessionRun("1-0-a", 1.0, recipe, house, None, str),
    }
    for start in starts.values():  # nobody has it
        with pytest.raises(InputError, match="looked"):
            start()
    assert len(looked) == 3
    with closing(RunFolder(tmp_path)) as other:
        other.open(recipe)
        for name, start in starts.items():
            with pytest.raises(InputError, match="is in use by a running job"):
                start()
            assert len(looked) == 3, name


def test_a_run_that_another_job_began_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    recipe = load_recipe("launch/recipes/toy_moe.yaml", [f"output_dir={tmp_path}"])
    with closing(RunFolder(tmp_path)) as late, closing(RunFolder(tmp_path)) as first:
        late.claim()  # there is nothing yet
        first.claim()
        first.open(recipe)
        first.add_metrics({"step": 0})
        first.close()
        with pytest.raises(InputError, match="another job has begun a run there"):
            late.open(recipe)
        again = RunFolder(tmp_path)
        late.close()
        again.claim()
        again.open(recipe)
        again.close()


def test_a_folder_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    """So is one in a folder that this user may not enter, which root always may."""
    recipe = load_recipe("launch/recipes/toy_moe.yaml")
    folder = RunFolder(tmp_path / ("n" * 300) / "run")
    for look in (folder.claim, lambda: folder.check(recipe)):
        with pytest.raises(InputError, match="File name too long; choose another"):
            look()


def test_the_rows_of_repeated_steps_are_kept_aside(tmp_path: Path) -> None:
    """A run whose checkpoints were removed begins again; its curve so far is still there."""
    folder = RunFolder(tmp_path)
    for step in range(4):
        folder.add_metrics({"step": step, "reward/mean": step / 4})
    rows = folder.metrics.read_bytes().splitlines(keepends=True)
    for number, step in enumerate((4, 2, 2, 0)):
        folder.rewind(step)
        assert folder.metrics.read_bytes() == b"".join(rows[:step])
        aside = sorted(tmp_path.glob("dropped_*/metrics.jsonl"))
        assert len(aside) == (0, 1, 1, 2)[number]
    assert [file.read_bytes() for file in aside] == [b"".join(rows[2:]), b"".join(rows[:2])]


@pytest.mark.parametrize("key", ["data.path", "reward"])
def test_another_task_is_another_run(key: str) -> None:
    with pytest.raises(InputError, match="; start a new run in another output_dir, or continue it"):
        check_allowed([Change(key, 1, 2, Kind.ALLOW)], (), "run", "what")
