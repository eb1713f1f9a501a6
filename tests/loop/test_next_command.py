"""The command that a run prints at its end starts it again as it was started."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config import dump_recipe, load_recipe
from mrl.jobs.restart_command import serve_command, train_command
from mrl.run.folder import RunFolder
from tests.loop.conftest import TOY_RECIPE, Toy

ONE_NODE = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
TWO_NODES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
JOB = {**TWO_NODES, "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


def test_the_launcher_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/elsewhere/mrl/__main__.py"])
    folder = RunFolder(tmp_path)
    config = str(folder.config)
    assert train_command(folder, "a=1", env={}).endswith(f" -m mrl train {config} a=1")
    one = "python -m mrl.launch --standalone --nproc-per-node 4 -m mrl train "
    assert train_command(folder, "a=1", env=ONE_NODE) == f"{one}{config} a=1"
    two = (
        "python -m mrl.launch --nnodes 2 --rdzv-endpoint HOST:PORT --nproc-per-node 8 -m mrl train "
    )
    assert train_command(folder, "a=1", env=JOB) == f"{two}{config} a=1"
    (tmp_path / "train.sbatch").touch()
    batch = f"sbatch --nodes=2 {tmp_path}/train.sbatch {config} {tmp_path} a=1"
    assert train_command(folder, "a=1", env=JOB) == batch
    assert serve_command(tmp_path, JOB) == (
        f"SERVE=1 sbatch --nodes=2 {tmp_path}/train.sbatch {tmp_path}/service.yaml {tmp_path}"
    )
    serve = one.replace("train", "serve")
    assert serve_command(tmp_path, ONE_NODE) == f"{serve}{tmp_path}/service.yaml"
    parts = {"NUM_NODES": ("2", "4"), "PARTITION": ("big", "small")}
    env = {f"SLURM_JOB_{name}_HET_GROUP_{i}": parts[name][i] for name in parts for i in range(2)}
    assert train_command(folder, env={**JOB, "SLURM_HET_SIZE": "2", **env}) == (
        "sbatch --nodes=2 --partition=big : --exclusive --mem=0 --ntasks-per-node=1 --nodes=4 "
        f"--partition=small {tmp_path}/train.sbatch {config} {tmp_path}"
    )


def test_nodes_may_have_different_numbers_of_ranks(tmp_path: Path) -> None:
    """This node has one of five ranks, and the other node four."""
    env = {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    assert "--nnodes 2 " in train_command(RunFolder(tmp_path), env=env)


def test_what_is_printed_can_be_pasted_where_the_run_was_started(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(TOY_RECIPE, toy.overrides(Path("my runs/one")))
    folder = RunFolder(recipe.output_dir)
    folder.root.mkdir(parents=True)
    dump_recipe(recipe, folder.config)
    words = shlex.split(train_command(folder, "train.num_steps=8", env={}))
    assert words[-2:] == ["my runs/one/config.yaml", "train.num_steps=8"]
    main(["check", *words[-2:]])
    assert capsys.readouterr().out.endswith("ok\n")
