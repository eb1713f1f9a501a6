"""A run that goes on at another layout, from the newest checkpoint that is whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mrl.errors import InputError
from mrl.run.folder import RunFolder, saved_step
from parallel.checkpoint.manifest import damage, latest_step
from parallel.checkpoint.saved_tensors import SavedTensors
from tests.loop.conftest import Toy, environment, trained
from tests.loop.test_run import metrics
from tests.parallel.checkpoint.test_checkpoint_failures import slow_disk
from tests.ranks import run_ranks
from tests.release import release


@pytest.mark.timeout(400)
def test_a_damaged_checkpoint_is_left_out_and_the_layout_may_change(
    toy: Toy, recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def go(name: str, world: int, num_steps: int, *more: str) -> Path:
        output = tmp_path / name
        saved = f"debug.load_rollouts={recorded / 'rollouts'}"
        steps = (f"train.num_steps={num_steps}", "checkpoint.save_every=1", "checkpoint.keep=4")
        overrides = toy.overrides(output, saved, *steps, *more)
        run_ranks(world, trained, overrides, folder=tmp_path / f"out{name}{world}")
        return output

    run = go("run", 1, 2)
    damaged = run / "checkpoints/iter_0000002/__0_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    capfd.readouterr()
    layout = ("parallel.expert_model_parallel_size=2", "optimizer.use_distributed_optimizer=true")
    go("run", 2, 4, *layout)
    shown = " ".join(capfd.readouterr().out.split())
    assert "step done reward len" in shown  # the table's heading, though it begins with step 1
    assert "1 2/4 0." in shown
    assert "3 4/4 0." in shown
    assert "iter_0000002 is damaged, and left out" in shown
    assert "__0_0.distcp does not match its SHA-256" in shown
    assert "iter_0000002 is kept as iter_0000002.damaged" in shown
    dropped = run / "rollouts/dropped_0"
    assert [f.name for f in dropped.iterdir()] == ["step_000001.jsonl"]

    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
    assert (
        json.loads((run / "checkpoints/iter_0000004/manifest.json").read_text())["layout"]["ep"]
        == 2
    )
    ours, theirs = (SavedTensors(r / "checkpoints/iter_0000004") for r in (run, recorded))
    for key in theirs:
        if key.startswith("model."):
            assert float((ours[key] - theirs[key]).norm() / theirs[key].norm()) < 1e-4, key


def trained_until_it_fails(overrides: list[str]) -> str:
    try:
        with slow_disk(0.5):
            trained(overrides)
    except InputError as error:
        return str(error)
    return "done"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", [1, release(2)])
def test_a_step_that_fails_does_not_cost_the_save_in_flight(
    world: int, toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    rollouts = Path(shutil.copytree(recorded / "rollouts", tmp_path / "rollouts"))
    saved_step(rollouts, 2).write_bytes(b"not what was saved")
    more = (f"debug.load_rollouts={rollouts}", "train.num_steps=4", "checkpoint.save_every=1")
    overrides = toy.overrides(tmp_path / "run", *more)
    args = (world, trained_until_it_fails, overrides)
    for message in run_ranks(*args, folder=tmp_path / "out"):
        assert "step_000002.safetensors: not a safetensors blob" in message
    checkpoints = tmp_path / "run/checkpoints"
    assert latest_step(checkpoints) == 2
    assert damage(checkpoints / "iter_0000002") is None


def test_files_of_steps_that_are_done_again_are_moved_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    ends = (".jsonl", ".safetensors", ".safetensors.part")
    for history in range(2):
        for step in range(history, 4):
            for end in ends:
                (folder.rollouts / f"step_{step:06d}{end}").write_text(f"history {history}")
        for other in (folder.token_file(1), folder.token_file(3), folder.diagnosis_file(2)):
            other.parent.mkdir(exist_ok=True)
            other.write_text(f"history {history}")
        (folder.rollouts / "step_by_step.txt").write_text("the user's own")
        folder.add_metrics({"step": 0})
        folder.rewind(2)
    kept = {f"step_{step:06d}{end}" for step in range(2) for end in ends}
    moved = {f"step_{step:06d}{end}" for step in range(2, 4) for end in ends}
    found = {f.name for f in folder.rollouts.iterdir()}
    assert found == {*kept, "step_by_step.txt", "dropped_0", "dropped_1"}
    for history in range(2):
        dropped = folder.rollouts / f"dropped_{history}"
        assert {f.name for f in dropped.iterdir()} == moved
        assert {f.read_text() for f in dropped.iterdir()} == {f"history {history}"}
        for old in (folder.token_file(3), folder.diagnosis_file(2)):
            assert not old.exists()
            moved_to = old.parent / f"dropped_{history}" / old.name
            assert moved_to.read_text() == f"history {history}"
    assert folder.token_file(1).read_text() == "history 1"


@pytest.mark.release  # test_a_signal_saves_the_step_and_leaves has the signal
@pytest.mark.timeout(400)
def test_sigusr1_without_training_does_not_speak_of_a_checkpoint(toy: Toy, tmp_path: Path) -> None:
    output = tmp_path / "run"
    more = ("train.num_steps=500", "debug.rollout_only=true")
    code, errors = toy.told_to_leave(output, *more, env=environment())
    assert code == 75
    done = len(metrics(output))
    assert f"stopped with {done} steps done; debug.rollout_only saves no checkpoint" in errors
    assert "saved a checkpoint" not in errors
    assert not list((output / "checkpoints").iterdir())
