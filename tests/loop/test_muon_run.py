"""Muon in the whole loop: real rollouts with replay, a resumed run, and the size of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.preflight import check
from mrl.preflight.room import checkpoint_bytes
from mrl.run.folder import RunFolder
from parallel.checkpoint.saved_tensors import SavedTensors
from tests.loop.conftest import TOY_RECIPE, Toy, trained
from tests.ranks import run_ranks

MUON = ("optimizer.name=muon", "optimizer.use_distributed_optimizer=true", "moe.routing_replay=r3")


def checkpoint_sizes(toy: Toy, folder: Path) -> dict[str, int]:
    """Return what `mrl check` says of a checkpoint's bytes, for both optimizers."""
    recipes = {
        name: load_recipe(TOY_RECIPE, toy.overrides(folder / "new", f"optimizer.name={name}"))
        for name in ("adam", "muon")
    }
    return {name: checkpoint_bytes(check(recipe, 1)) for name, recipe in recipes.items()}


def test_a_matrix_has_one_moment_in_a_checkpoint(toy: Toy, tmp_path: Path) -> None:
    (found,) = run_ranks(1, checkpoint_sizes, toy, tmp_path, folder=tmp_path / "out")
    assert 0.6 * found["adam"] < found["muon"] < 0.75 * found["adam"]  # fp32: 8 bytes of 12


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_run_with_muon_learns_and_resumes_to_the_same_bits(toy: Toy, tmp_path: Path) -> None:
    def go(name: str, num_steps: int) -> None:
        steps = (f"train.num_steps={num_steps}", "checkpoint.save_every=2")
        overrides = toy.overrides(tmp_path / name, *steps, *MUON)
        run_ranks(2, trained, overrides, folder=tmp_path / f"out_{name}_{num_steps}")

    go("whole", 4)
    go("run", 2)
    go("run", 4)
    folders = [tmp_path / name / "checkpoints/iter_0000004" for name in ("whole", "run")]
    whole, run = map(SavedTensors, folders)
    assert list(whole) == list(run)
    assert all(whole[key].equal(run[key]) for key in whole)
    rows = [RunFolder(tmp_path / name).read_metrics() for name in ("whole", "run")]
    for key in ("loss/policy", "grad_norm", "reward/mean", "mismatch/k3"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]]
    for row in rows[0]:
        assert row["routing/replay_coverage"] == 1.0
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["rollout/canary_abs_mean"] < 1e-5
    size = sum(whole[key].nbytes for key in whole)
    (estimated,) = run_ranks(1, checkpoint_sizes, toy, tmp_path, folder=tmp_path / "out")
    assert size == pytest.approx(estimated["muon"], rel=0.05)
