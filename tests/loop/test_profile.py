"""A profiled step leaves a trace of the trainer and one of the engine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from mrl.config.profiling import ProfileConfig
from mrl.errors import InputError
from mrl.preflight.profile import check_profile
from mrl.run.profiler import profile_folder, profiled
from mrl.system.clock import Clock
from tests.loop.conftest import Toy


def names(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_only_the_steps_and_ranks_of_the_recipe_are_profiled(tmp_path) -> None:
    config = ProfileConfig(steps=(10, 12), ranks=(1,))
    for step in (9, 10, 11, 12):
        for rank in (0, 1):
            with profiled(config, tmp_path, step, rank), Clock().part("train"):
                pass
    found = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.gz"))
    assert found == [f"profile/step_0000{n}/trainer_rank_1.pt.trace.json.gz" for n in (10, 12)]
    assert "mrl: train" in names(tmp_path / found[0])


def test_a_rank_that_is_not_there_is_refused() -> None:
    check_profile(ProfileConfig(ranks=(8,)), 2)  # profiles nothing
    with pytest.raises(InputError, match=r"profile.ranks: got \[8\].*0 to 1"):
        check_profile(ProfileConfig(steps=(1,), ranks=(0, 8)), 2)


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_run_profiles_trainer_and_engine(toy: Toy, tmp_path) -> None:
    more = ("train.num_steps=3", "profile.steps=[1]")
    done = toy.run(tmp_path / "run", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout + done.stderr
    folder = profile_folder(tmp_path / "run", 1)
    assert [each.name for each in folder.parent.iterdir()] == ["step_000001"]
    trainer, engine = sorted(folder.iterdir(), reverse=True)
    assert trainer.name == "trainer_rank_0.pt.trace.json.gz"
    assert engine.name.startswith("engine_00-")
    parts = {"mrl: sync", "mrl: rollout", "mrl: score", "mrl: logprob", "mrl: train"}
    assert parts <= names(trainer)
    assert "aten::linear" in names(trainer)
    assert any(str(name).startswith("aten::") for name in names(engine))
