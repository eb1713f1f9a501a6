"""A policy and its critic in one checkpoint: any layout loads both, and neither for the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from mrl.errors import InputError
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.critic import Critic
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import build, join_mesh, loss, ready_batch
from tests.parallel.test_critic import loss as value_loss
from tests.ranks import run_ranks
from tests.release import release

STEP = 1


def build_critic(model_path: Path, policy: Policy, mesh: Mesh) -> Critic:
    critic = Critic(
        HfModel.read(model_path),
        mesh,
        ModelConfig(path=str(model_path), dtype="float32"),
        OptimizerConfig(lr=1e-3),
        recompute=False,
        ledger=policy.ledger,
        head_std=0.1,
        seed=3,
    )
    policy.share_device(critic)
    return critic


def both(model_path: Path, sizes: dict[str, int]) -> tuple[Policy, Critic, Mesh]:
    mesh = join_mesh(model_path, sizes)
    policy = build(model_path, mesh)
    return policy, build_critic(model_path, policy, mesh), mesh


def save(model_path: Path, samples: list[Sample], root: Path) -> None:
    policy, critic, mesh = both(model_path, {})
    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, Replay.rollout)
    critic.train_step(batch, value_loss, Replay.off)
    critic.train_step(batch, value_loss, Replay.off)  # its own number of steps
    store = Checkpoints(root, mesh, keep=3)
    store.save(STEP, policy, {"a": 1}, critic)
    store.save(STEP + 1, policy, {})


def load(model_path: Path, sizes: dict[str, int], root: Path, again: Path) -> dict[str, Any]:
    policy, critic, mesh = both(model_path, sizes)
    store = Checkpoints(root, mesh, keep=3)
    loaded = store.load(STEP, policy, critic)
    assert loaded.trainer == {"a": 1}
    Checkpoints(again, mesh, keep=3).save(STEP, policy, {}, critic)
    store.load(STEP, policy)  # whoever wants the policy alone may have it
    with pytest.raises(InputError, match=r"it has no critic; give the critic\.path"):
        store.load(STEP + 1, policy, critic)

    places = policy.ledger.where()
    assert {"parameters", "critic_parameters", "critic_optimizer"} <= places.keys()
    trained = policy.optimizer, critic.optimizer
    return {"steps": [int(next(iter(o.state.values()))["step"]) for o in map(_inner, trained)]}


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer


@pytest.mark.parametrize("layout", [release((1, {})), (2, {"tensor": 2})])
def test_both_come_back_bit_for_bit(
    layout: tuple[int, dict[str, int]], model_path: Path, tmp_path: Path
) -> None:
    root, again = tmp_path / "saved", tmp_path / "again"
    run_ranks(1, save, model_path, few_samples(), root, folder=tmp_path / "a")
    world, sizes = layout
    outs = run_ranks(world, load, model_path, sizes, root, again, folder=tmp_path / "b")
    assert all(out["steps"] == [1, 2] for out in outs)
    ours, theirs = (SavedTensors(r / f"iter_{STEP:07d}") for r in (again, root))
    kept = [key for key in theirs if not key.startswith("random.")]
    assert any(key.startswith("critic_model.output_layer") for key in kept)
    assert all(torch.equal(ours[key], theirs[key]) for key in kept)


def moves(model_path: Path, samples: list[Sample]) -> None:
    """The moves of a GPU, by hand on a CPU: all of a critic leaves before an engine wakes."""
    policy, critic, mesh = both(model_path, {})
    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, Replay.rollout)
    critic.train_step(batch, value_loss, Replay.off)
    before = [t.clone() for t in critic.values(batch.micro_batches)[0]]
    elsewhere = dataclasses.replace(mesh, device=torch.device("meta"))
    for model in (policy, critic):
        model.mesh = elsewhere  # not a CPU: there nothing moves
    policy.offload_optimizer()
    places = {kind: policy.ledger.place(kind) for kind in policy.ledger.where()}
    assert places == {
        "parameters": "device",
        "gradients": "freed",
        "optimizer": "host",
        "critic_parameters": "host",
        "critic_gradients": "freed",
        "critic_optimizer": "host",
    }
    policy.offload_parameters()
    policy.onload()
    assert all(policy.ledger.place(kind) == "device" for kind in places)
    for model in (policy, critic):
        model.mesh = mesh
    after = critic.values(batch.micro_batches)[0]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_critic_leaves_the_device_with_the_policy(model_path: Path, tmp_path: Path) -> None:
    run_ranks(1, moves, model_path, few_samples(), folder=tmp_path)
