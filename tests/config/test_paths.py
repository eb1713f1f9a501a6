"""Paths of a recipe hold from any directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mrl.config import dump_recipe, load_recipe
from mrl.config.paths import resolve_paths
from mrl.errors import InputError

RECIPE = {
    "model": {"path": "models/small"},
    "train": {"num_steps": 1},
    "rollout": {
        "max_response_len": 4,
        "engine": "code/engine.py:Mine",
        "server_args": {"tool_server_path": "code"},
    },
    "algorithm": {"name": "code/loss.py"},
    "reward": "code/reward.py:score",
    "data": {"path": "data/rows.jsonl"},
    "eval": {
        "sets": [{"name": "a", "path": "data/*.jsonl", "reward": "reward_model:models/small"}]
    },
    "output_dir": "runs/one",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with recipes in a folder of their own, and paths from the project's root."""
    for file in ("data/rows.jsonl", "code/reward.py", "code/loss.py", "code/engine.py"):
        (tmp_path / "project" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / file).touch()
    for folder in ("models/small", "recipes/deep"):
        (tmp_path / "project" / folder).mkdir(parents=True)
    text = yaml.safe_dump(RECIPE)
    (tmp_path / "project/recipes/deep/one.yaml").write_text(text)
    return tmp_path / "project"


def test_a_recipe_finds_its_files_from_any_directory(project, monkeypatch):
    monkeypatch.chdir("/")
    recipe = load_recipe(project / "recipes/deep/one.yaml")
    assert recipe.model.path == str(project / "models/small")
    assert recipe.data.path == str(project / "data/rows.jsonl")
    assert recipe.reward == f"{project}/code/reward.py:score"
    assert recipe.algorithm.name == f"{project}/code/loss.py"
    assert recipe.rollout.engine == f"{project}/code/engine.py:Mine"
    assert recipe.eval.sets[0].path == f"{project}/data/*.jsonl"
    assert recipe.eval.sets[0].reward == f"reward_model:{project}/models/small"
    assert recipe.rollout.server_args == {"tool_server_path": "code"}  # SGLang's, not ours


def test_the_current_directory_comes_first_then_the_folder_of_the_recipe(project, monkeypatch):
    beside = project / "recipes/deep/data/rows.jsonl"
    beside.parent.mkdir()
    beside.touch()
    monkeypatch.chdir("/")
    assert load_recipe(project / "recipes/deep/one.yaml").data.path == str(beside)
    monkeypatch.chdir(project)
    assert load_recipe("recipes/deep/one.yaml").data.path == str(project / "data/rows.jsonl")


def test_overrides_look_in_the_current_directory_only(project, monkeypatch):
    other = project / "elsewhere/data"
    other.mkdir(parents=True)
    (other / "mine.jsonl").touch()
    file = project / "recipes/deep/one.yaml"
    monkeypatch.chdir(other.parent)
    assert load_recipe(file, ["data.path=data/mine.jsonl"]).data.path == str(other / "mine.jsonl")
    assert load_recipe(file, ["data.path=data/rows.jsonl"]).data.path == "data/rows.jsonl"


def test_what_is_nowhere_stays_as_it_was_given(project, monkeypatch):
    file = project / "recipes/deep/one.yaml"
    recipe = load_recipe(file, ["data.path=gone.jsonl", "reward=gone.py:f", "model.path=Org/Name"])
    found = (recipe.data.path, recipe.reward, recipe.model.path)
    assert found == ("gone.jsonl", "gone.py:f", "Org/Name")
    monkeypatch.setenv("HOME", str(project))
    home = load_recipe(file, ["model.path=~/models/small"])
    assert home.model.path == str(project / "models/small")


def test_the_config_of_a_run_means_the_same_from_any_directory(project, monkeypatch):
    monkeypatch.chdir(project)
    recipe = load_recipe("recipes/deep/one.yaml")
    assert recipe.output_dir == "runs/one"
    dump_recipe(recipe, project / "config.yaml")
    here = load_recipe("config.yaml")
    monkeypatch.chdir("/")
    there = load_recipe(project / "config.yaml")
    assert there == here
    assert there.output_dir == str(project / "runs/one")


def test_a_new_folder_may_lie_in_the_home_folder(project, monkeypatch):
    """Otherwise a run would make a folder with the name `~` or `$SCRATCH`."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SCRATCH", "/scratch")
    overrides = ["output_dir=~/runs/a", "checkpoint.snapshot_folder=~/b"]
    recipe = load_recipe("recipes/deep/one.yaml", overrides)
    assert recipe.output_dir == "/home/ada/runs/a"
    assert recipe.checkpoint.snapshot_folder == "/home/ada/b"
    file = project / "recipes/variable.yaml"
    file.write_text(yaml.safe_dump(RECIPE | {"output_dir": "$SCRATCH/a"}))
    assert load_recipe(file, ["output_dir=/scratch/a"]).output_dir == "/scratch/a"
    with pytest.raises(InputError, match=r"^output_dir: got '\$SCRATCH/a'"):
        load_recipe(file)
    for given in ("$SCRATCH/a", "${SCRATCH}/a"):
        with pytest.raises(InputError, match=r"^output_dir: got .*variables are not replaced in a"):
            load_recipe("recipes/deep/one.yaml", [f"output_dir={given}"])
    assert load_recipe("recipes/deep/one.yaml", ["output_dir=costs$"]).output_dir == "costs$"


def test_an_argument_of_an_environment_may_have_a_variable() -> None:
    tree = {"environment": {"arguments": {"output_dir": "$HOME/x"}}}
    assert resolve_paths(tree, None) == tree


def test_names_of_columns_and_stop_texts_are_no_paths(project, monkeypatch) -> None:
    monkeypatch.chdir(project)
    (project / "solution").mkdir()
    (project / "main.py").touch()
    overrides = ["data.columns={path: solution, answer_path: solution}", "rollout.stop=[main.py]"]
    recipe = load_recipe(project / "recipes/deep/one.yaml", overrides)
    assert recipe.data.columns == {"path": "solution", "answer_path": "solution"}
    assert recipe.rollout.stop == ("main.py",)
