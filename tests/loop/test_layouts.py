"""Saved rollouts through the trainer: one optimizer step in every layout equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config import load_recipe
from mrl.preflight import check
from mrl.run.folder import RunFolder
from parallel.mesh import init_mesh, world_size
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.ranks import run_ranks
from tests.release import release

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "DP2": (2, []),
    "EP2": (2, ["expert_model=2"]),
    "TP2": (2, ["tensor_model=2"]),
    "CP2": (2, ["context=2"]),
    "PP2": (2, ["pipeline_model=2"]),
    "TP2xEP2": (2, ["tensor_model=2", "expert_model=2"]),
    "PP2xEP2": (4, ["pipeline_model=2", "expert_model=2"]),
}

OPTIMIZER = ("optimizer.lr=1e-3", "optimizer.adam_eps=1e-6")
"""Adam's first step is lr * g / (|g| + eps): where a gradient cancels to rounding noise, its sign is
noise too. With eps above the noise the weights compare the gradients."""


def one_step(overrides: list[str]) -> dict[str, Any]:
    """A step of a fresh run on this rank: its metrics and the weights after it."""
    from mrl.trainer import Trainer

    recipe = load_recipe(TOY_RECIPE, overrides)
    plan = check(recipe, world_size())
    folder = RunFolder(recipe.output_dir)
    if torch.distributed.is_initialized():
        raise AssertionError("one world a process")
    mesh = init_mesh(plan.dims, recipe.seed)
    if mesh.rank == 0:
        folder.open(recipe)
    trainer = Trainer(plan, mesh, folder)
    metrics = trainer.run_step()
    buckets = trainer.policy.export(1, 1 << 16)
    weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors}
    return {"metrics": metrics, "weights": weights}


def run(
    toy: Toy, recorded: Path, folder: Path, world: int, sizes: list[str], *more: str
) -> dict[str, Any]:
    keys = [f"parallel.{s.replace('=', '_parallel_size=')}" for s in sizes]
    saved = (f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4")
    overrides = toy.overrides(folder / "run", *saved, *OPTIMIZER, *keys, *more)
    return run_ranks(world, one_step, overrides, folder=folder / "out")[0]


@pytest.fixture(scope="module")
def reference(toy: Toy, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(toy, recorded, tmp_path_factory.mktemp("one"), 1, [])


def test_saved_rollouts_give_the_live_run(reference: dict[str, Any], recorded: Path) -> None:
    from tests.loop.test_run import metrics

    live = metrics(recorded)[0]
    for key in ("grad_norm", "entropy", "reward/mean", "mismatch/logprob_abs_max"):
        assert reference["metrics"][key] == live[key], key


ALL = [(name, recompute) for name in LAYOUTS for recompute in ("false", "true")]
IN_SHORT = {("EP2", "true")}
"""`make test` runs this one, and has the other kinds of parallelism in tests/parallel."""


@pytest.mark.parametrize(
    ("name", "recompute"), [case if case in IN_SHORT else release(*case) for case in ALL]
)
def test_layout(
    name: str,
    recompute: str,
    toy: Toy,
    recorded: Path,
    reference: dict[str, Any],
    tmp_path: Path,
) -> None:
    world, sizes = LAYOUTS[name]
    ours = run(toy, recorded, tmp_path, world, sizes, f"train.recompute={recompute}")
    for key in ("grad_norm", "entropy", "mismatch/logprob_abs_mean", "reward/mean"):
        assert ours["metrics"][key] == pytest.approx(
            reference["metrics"][key], rel=1e-5, abs=1e-7
        ), key
    # At the first step every ratio is 1, so the loss is a sum of advantages around 0.
    assert ours["metrics"]["loss/policy"] == pytest.approx(
        reference["metrics"]["loss/policy"], abs=1e-6
    )
    assert ours["metrics"]["routing/replay_coverage"] == 1.0
    assert ours["weights"].keys() == reference["weights"].keys()
    for key, weight in reference["weights"].items():
        assert float((ours["weights"][key] - weight).norm() / weight.norm()) < 1e-5, key


CREDITED = (
    "algorithm.name=ppo",
    "critic.lr=1e-3",
    "critic.head_std=0.1",
    "algorithm.kl_coef=0.1",
    "algorithm.kl_in=reward",
    "algorithm.kl_target=1e-3",
    "algorithm.kl_horizon=100",
    "train.num_steps_per_rollout=2",
)
"""A critic, penalties of tokens, and a second update, before which the policy has moved."""


@pytest.fixture(scope="module")
def credited(toy: Toy, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(toy, recorded, tmp_path_factory.mktemp("credited"), 1, [], *CREDITED)


@pytest.mark.release  # tests/parallel/test_critic.py has the critic in layouts
@pytest.mark.parametrize("name", ["CP2", "PP2"])
def test_a_critic_and_penalties_are_those_of_one_process_in_a_layout(
    name: str, toy: Toy, recorded: Path, credited: dict[str, Any], tmp_path: Path
) -> None:
    ours = run(toy, recorded, tmp_path, *LAYOUTS[name], *CREDITED)
    for key in ("grad_norm", "loss/value", "value/grad_norm", "value/return_mean", "ratio/max"):
        assert ours["metrics"][key] == pytest.approx(
            credited["metrics"][key], rel=1e-4, abs=1e-7
        ), key
    assert ours["metrics"]["kl/coef"] == credited["metrics"]["kl/coef"]
    for key, weight in credited["weights"].items():
        assert float((ours["weights"][key] - weight).norm() / weight.norm()) < 1e-4, key


def two_steps(overrides: list[str]) -> list[dict[str, float]]:
    from mrl.trainer import Trainer

    recipe = load_recipe(TOY_RECIPE, overrides)
    plan = check(recipe, world_size())
    folder = RunFolder(recipe.output_dir)
    mesh = init_mesh(plan.dims, recipe.seed)
    folder.open(recipe)
    trainer = Trainer(plan, mesh, folder)
    return [trainer.run_step() for _ in range(2)]


def test_kl_penalty_and_balancing_in_the_loop(toy: Toy, recorded: Path, tmp_path: Path) -> None:
    saved = (f"debug.load_rollouts={recorded / 'rollouts'}", "train.num_steps=4")
    on = (
        "algorithm.kl_coef=0.1",
        "moe.z_loss_coeff=1e-3",
        "moe.aux_loss_coeff=1e-3",
        "moe.load_balancing_type=seq_aux_loss",
    )
    overrides = toy.overrides(tmp_path / "run", *saved, *OPTIMIZER, *on)
    first, second = run_ranks(1, two_steps, overrides, folder=tmp_path / "out")[0]
    assert first["kl/ref"] == 0.0
    assert second["kl/ref"] > 0.0
    for metrics in (first, second):
        assert metrics["time/ref_logprob_s"] > 0
        assert metrics["moe/z_loss"] > 0
        assert metrics["moe/aux_loss"] >= 1.0
        router = 4 * 1e-3 * (metrics["moe/aux_loss"] + metrics["moe/z_loss"])  # of 4 MoE layers
        assert metrics["loss/total"] - metrics["loss/policy"] == pytest.approx(router)
        assert 1.0 <= metrics["moe/load_max/layer_01"] <= metrics["moe/load_max"] <= 8.0
        assert metrics["memory/train/reference_host_bytes"] > 0
        sizes = [metrics[f"memory/train/{k}_device_bytes"] for k in ("parameters", "optimizer")]
        assert metrics["memory/rollout/parameters_device_bytes"] == sizes[0]  # one memory
        assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.01)  # two fp32 moments
