"""A run that goes on at another layout, from the newest checkpoint that is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.cli import train
from mrl.config import load_recipe
from parallel.groups import world_size
from parallel.saved_tensors import SavedTensors
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.loop.test_run import metrics
from tests.ranks import run_ranks


def trained(overrides: list[str]) -> None:
    """`mrl train` on this rank."""
    train(load_recipe(TOY_RECIPE, overrides), world_size())


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

    whole = go("whole", 1, 4)
    run = go("run", 1, 2)
    damaged = run / "checkpoints/iter_0000002/__0_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    capfd.readouterr()
    layout = ("parallel.expert_model_parallel_size=2", "optimizer.use_distributed_optimizer=true")
    go("run", 2, 4, *layout)
    shown = " ".join(capfd.readouterr().out.split())
    assert "iter_0000002 is damaged and left out" in shown
    assert "__0_0.distcp does not match its SHA-256" in shown

    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3]
    assert (
        json.loads((run / "checkpoints/iter_0000004/manifest.json").read_text())["layout"]["ep"]
        == 2
    )
    ours, theirs = (SavedTensors(r / "checkpoints/iter_0000004") for r in (run, whole))
    for key in theirs:
        if key.startswith("model."):
            assert float((ours[key] - theirs[key]).norm() / theirs[key].norm()) < 1e-4, key
