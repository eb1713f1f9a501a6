"""What stops a run, or warns, between the backward pass and the optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import gspo
from mrl.config import AlgorithmConfig, load_recipe
from mrl.errors import RunFailed
from mrl.learn import updates
from mrl.learn.step_data import without_loss
from mrl.preflight import check
from mrl.run.folder import RunFolder, saved_step
from mrl.run.rollouts import load_groups
from mrl.system.clock import Clock
from mrl.types import LossOutput, MicroBatch
from parallel.mesh import init_mesh, world_size
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.loop.stepped import collected
from tests.ranks import run_ranks
from tests.release import release

NAN = float("nan")


AT_ONCE = "guards.max_nonfinite_steps=1"
POISONED = (4, 6)
"""Samples of the step whose numbers are spoiled."""


def made_trainer(overrides: list[str], **changes: Any) -> Any:
    """Makes this rank's trainer, with `changes` to its plan."""
    from mrl.trainer import Trainer

    recipe = load_recipe(TOY_RECIPE, overrides)
    plan = dataclasses.replace(check(recipe, world_size()), **changes)
    mesh = init_mesh(plan.dims, recipe.seed)
    folder = RunFolder(recipe.output_dir)
    if mesh.rank == 0:
        folder.open(recipe)
    return Trainer(plan, mesh, folder)


def one_poisoned_step(overrides: list[str], what: str) -> dict[str, Any]:
    """A step on this rank whose loss is spoiled in two samples -> the error, and what moved."""
    trainer = made_trainer(overrides, algorithm=Poisoned(what))
    mesh, folder = trainer.mesh, trainer.folder
    before = [p.detach().clone() for p in trainer.policy.chunks[0].parameters()]
    if what == "model" and mesh.rank == 0:
        next(trainer.policy.chunks[0].parameters()).register_hook(lambda grad: grad * NAN)
    try:
        trainer.run_step()
        error = ""
    except RunFailed as failed:
        error = str(failed)
    after = trainer.policy.chunks[0].parameters()
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"error": error, "same": same, "on_file": folder.rollout_file(0).exists()}


def one_step_of_spoilt_outputs(overrides: list[str], what: str) -> str:
    """A step on this rank in which the critic's values or their gradients, or the reference's
    log-probs, are not finite in two samples -> the error."""
    trainer = made_trainer(overrides)
    if what == "value loss":
        updates.critic_loss = spoilt_loss(updates.critic_loss)
    elif what == "values":
        assert trainer.critic is not None
        trainer.critic.values = spoilt(trainer.critic.values, lambda result: result[0])
    else:  # after those of the policy
        forward_only = trainer.policy.forward_only
        trainer.policy.forward_only = spoilt(forward_only, lambda r: r.logprobs, first=1)
    try:
        trainer.run_step()
    except RunFailed as failed:
        return str(failed)
    return ""


def spoilt(compute: Any, outputs: Callable[[Any], list[Tensor]], first: int = 0) -> Any:
    """`compute` of micro-batches, whose outputs from call `first` on are NaN in POISONED."""
    calls = count()

    def computed(batches: list[MicroBatch], *args: Any, **options: Any) -> Any:
        result = compute(batches, *args, **options)
        if next(calls) >= first:
            for batch, values in zip(batches, outputs(result), strict=True):
                assert batch.sample_ids is not None
                bad = torch.isin(batch.sample_ids, torch.tensor(POISONED))
                values[bad.repeat_interleave(batch.cu_seqlens.diff()) & batch.loss_mask] = NAN
        return result

    return computed


def spoilt_loss(compute: Any) -> Any:
    """`compute` with gradients that are infinite in POISONED."""

    def computed(outputs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        assert batch.sample_ids is not None
        bad = torch.isin(batch.sample_ids, torch.tensor(POISONED))
        lengths = batch.cu_seqlens.diff().long()
        spoilt = bad.repeat_interleave(lengths) & batch.loss_mask
        output = compute(outputs, batch, config)
        infinite = torch.where(spoilt, outputs - outputs.detach(), 0.0).sqrt()  # slope 1/0
        return LossOutput(output.loss_sum + infinite.sum(), output.stats)

    return computed


OUTPUTS = {
    "values": ("the critic's values are", ["algorithm.name=ppo"]),
    "value loss": ("gradients are", ["algorithm.name=ppo"]),
    "reference": (
        "the reference's log-probs are",
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    ),
}


@pytest.mark.parametrize(
    ("what", "world"),
    [
        ("values", 1),
        ("reference", 1),
        release("value loss", 1),
        *(release(each, 2) for each in OUTPUTS),
    ],
)
def test_a_critic_or_a_reference_that_is_not_finite_names_its_samples(
    toy: Toy, recorded: Path, tmp_path: Path, what: str, world: int
) -> None:
    """Whitening would spread a NaN over all samples, and NaN rewards count as abstentions."""
    name, more = OUTPUTS[what]
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    overrides = toy.overrides(tmp_path / "run", saved, "train.num_steps=4", *more)
    args = ([*overrides, AT_ONCE], what)
    for error in run_ranks(world, one_step_of_spoilt_outputs, *args, folder=tmp_path / "out"):
        assert f"{name} not finite in samples 4, 6 (counted from 0" in error


def steps_with_empty_mini_batches(overrides: list[str]) -> list[dict[str, Any]]:
    """The first of two mini-batches has no loss token, then neither -> metrics, and what moved."""
    trainer = made_trainer(overrides)
    found = []
    for num_empty in (1, 2):
        before = [p.detach().clone() for p in trainer.policy.chunks[0].parameters()]
        groups = collected(trainer)
        for group in groups[: num_empty * len(groups) // 2]:
            group.samples = [without_loss(sample) for sample in group.samples]
        trainer.policy.onload()
        metrics = trainer.learner.learn(trainer.step, groups, Clock(), lambda groups: None)
        trainer.step += 1
        after = trainer.policy.chunks[0].parameters()
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append({"metrics": metrics, "same": same})
    return found


@pytest.mark.parametrize("name", [release("grpo"), release("a3po"), "ppo"])
def test_a_mini_batch_without_a_loss_token_moves_nothing(
    toy: Toy, recorded: Path, tmp_path: Path, name: str
) -> None:
    """Adam alone would: it remembers the step before."""
    overrides = toy.overrides(
        tmp_path / "run",
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "train.num_steps=4",
        "train.num_steps_per_rollout=2",
        "diagnosis.save_tokens_every=0",
        "diagnosis.decompose_every=0",
        f"algorithm.name={name}",
    )
    (found,) = run_ranks(1, steps_with_empty_mini_batches, overrides, folder=tmp_path / "out")
    some, nothing = found
    assert not some["same"]
    assert some["metrics"]["train/empty_mini_batches"] == 1.0
    assert some["metrics"]["grad_norm"] > 0
    assert nothing["same"]
    assert nothing["metrics"]["train/empty_mini_batches"] == 2.0
    assert nothing["metrics"]["grad_norm"] == 0.0
    assert math.isnan(nothing["metrics"]["loss/policy"])


def one_step(overrides: list[str]) -> dict[str, float]:
    return made_trainer(overrides).run_step()


def test_samples_that_leave_the_loss_are_saved_whole(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    """So that a rollout can be trained on with the filter off."""
    overrides = toy.overrides(
        tmp_path / "run",
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "debug.save_rollouts=true",
        "train.num_steps=4",
        "algorithm.overlong_filter=true",
    )
    (metrics,) = run_ranks(1, one_step, overrides, folder=tmp_path / "out")
    loaded = load_groups(saved_step(tmp_path / "run/rollouts", 0))
    ends = [(s.finish_reason, bool(s.loss_mask.any())) for g in loaded for s in g.samples]
    assert metrics["reward/overlong_filtered"] == sum(end == "length" for end, _ in ends) > 0
    assert all(in_loss for _, in_loss in ends)


class Poisoned:
    """GSPO with numbers that are not finite in some samples."""

    RATIO, CLIP_LOW, CLIP_HIGH = gspo.RATIO, gspo.CLIP_LOW, gspo.CLIP_HIGH
    advantages = staticmethod(gspo.advantages)
    sequence_weights = staticmethod(gspo.sequence_weights)

    def __init__(self, what: str) -> None:
        self.what = what

    def loss(self, logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        compute = spoilt_loss(gspo.loss) if self.what == "log-probs" else gspo.loss
        return compute(logprobs, batch, config)


@pytest.mark.parametrize(
    ("what", "world"),
    [
        *(("log-probs", 2), ("model", 1)),
        *(release("nothing", world) for world in (1, 2)),
        *(release("log-probs", 1), release("model", 2)),
    ],
)
def test_what_is_not_finite_stops_before_the_optimizer_and_names_its_samples(
    toy: Toy, recorded: Path, tmp_path: Path, what: str, world: int
) -> None:
    overrides = toy.overrides(
        tmp_path / "run",
        f"debug.load_rollouts={recorded / 'rollouts'}",
        "train.num_steps=4",
        AT_ONCE,
    )
    for rank in run_ranks(world, one_poisoned_step, overrides, what, folder=tmp_path / "out"):
        assert rank["on_file"]
        if what == "nothing":
            assert rank["error"] == ""
            assert not rank["same"]
        elif what == "model":
            assert "a gradient of the weights is not finite" in rank["error"]
            assert "look at these samples" in rank["error"]
            assert rank["same"]
        else:
            assert "gradients are not finite in samples 4, 6 (counted from 0" in rank["error"]
            assert rank["same"]
