"""The critic: every layout against one process, a head that learns, and its place in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from moe.routes import Replay
from mrl.algorithms import grpo
from mrl.algorithms.value_loss import value_loss
from mrl.config import ModelConfig, OptimizerConfig
from mrl.learn.batching import make_train_batch
from mrl.types import LossOutput, MicroBatch, Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.critic import VALUE_HEAD, Critic
from parallel.export import export_buckets
from parallel.hf_config import HfModel
from parallel.ledger import Ledger
from parallel.mesh import Mesh
from parallel.reduce import reduce_statistics
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import LAYOUTS, TOLERANCE, distance, join_mesh
from tests.ranks import run_ranks
from tests.release import release

HEAD_STD = 0.1


def build(model_path: Path, mesh: Mesh, ledger: Ledger, recompute: bool = False) -> Critic:
    return Critic(
        HfModel.read(model_path),
        mesh,
        ModelConfig(path=str(model_path)),
        OptimizerConfig(lr=1e-3, clip_grad=0),
        recompute=recompute,
        ledger=ledger,
        head_std=HEAD_STD,
        seed=3,
    )


def exported(critic: Critic) -> dict[str, Tensor]:
    buckets = export_buckets(critic.weights, 0, 4096)
    return {name: t.clone() for bucket in buckets for name, t in bucket.tensors}


def loss(values: Tensor, batch: MicroBatch) -> LossOutput:
    """Token t should be worth (its id modulo 5) - 2, from wherever the value is now."""
    return value_loss(
        values,
        values.detach(),
        (batch.input_ids % 5 - 2.0).float(),
        batch.loss_mask,
        batch.cu_seqlens,
        batch.seq_weight,
        clip=0.2,
    )


def exercise(
    model_path: Path,
    sizes: dict[str, int],
    samples: list[Sample],
    num_steps: int,
    checkpoints: Path,
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)
    result: dict[str, Any] = {}
    for recompute in (False, True):
        ledger = Ledger(mesh.device)
        critic = build(model_path, mesh, ledger, recompute)
        batch = make_train_batch(samples, [0.0] * len(samples), grpo, mesh, 64)
        result["start"] = exported(critic)[VALUE_HEAD]
        result["values"], result["after"] = critic.values(batch.micro_batches)
        steps = []
        for _ in range(num_steps):
            out = critic.train_step(batch, loss, Replay.off)
            steps.append({**reduce_statistics(out.stats), "grad_norm": out.grad_norm})
        result[f"steps/{recompute}"] = steps
        result[f"weights/{recompute}"] = exported(critic)
    store = Checkpoints(checkpoints, mesh, keep=1)
    store.save(num_steps, critic, {})
    other = build(model_path, mesh, Ledger(mesh.device))
    store.load(num_steps, other)
    for each in (critic, other):
        each.train_step(batch, loss, Replay.off)
    ours, theirs = exported(critic), exported(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    before = ledger.where()
    assert list(before) == ["critic_parameters", "critic_gradients", "critic_optimizer"]
    ledger.free("critic_gradients")
    ledger.to_host("critic_optimizer")
    ledger.to_host("critic_parameters")
    with pytest.raises(RuntimeError, match="critic_parameters"):
        critic.values(batch.micro_batches)
    critic.onload()
    assert ledger.where() == before
    critic.train_step(batch, loss, Replay.off)
    other.train_step(batch, loss, Replay.off)
    ours, theirs = exported(critic), exported(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    return result


def learns(model_path: Path, samples: list[Sample], num_steps: int) -> dict[str, Any]:
    """The squared error before each step, and the head before the first and after the last."""
    mesh = join_mesh(model_path, {})
    critic = build(model_path, mesh, Ledger(mesh.device))
    start = exported(critic)[VALUE_HEAD]
    batch = make_train_batch(samples, [0.0] * len(samples), grpo, mesh, 64)
    steps = [
        reduce_statistics(critic.train_step(batch, loss, Replay.off).stats)
        for _ in range(num_steps)
    ]
    errors = [step["value/squared_error"] for step in steps]
    return {"start": start, "errors": errors, "head": exported(critic)[VALUE_HEAD]}


@pytest.fixture(scope="module")
def one_process(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("critic")
    return run_ranks(1, exercise, model_path, {}, few_samples(), 2, folder / "c", folder=folder)[0]


def test_values_are_a_linear_map_of_the_last_hidden_states(
    model_path: Path, one_process: dict[str, Any], tmp_path: Path
) -> None:
    head = one_process["start"]
    assert head.shape == (1, 32)
    assert head.norm() > 0.1
    model = Qwen3MoeForCausalLM.from_pretrained(model_path, dtype=torch.float32).model
    theirs, after = [], []
    for sample in few_samples():
        with torch.no_grad():
            hidden = model(sample.token_ids.unsqueeze(0)).last_hidden_state[0]
        values = (hidden @ head.T).flatten()
        after.append(torch.where(sample.loss_mask, values, 0.0))
        theirs.append(torch.where(sample.loss_mask, values.roll(1), 0.0))
    # The same values, in the order of the packing.
    for name, parts in {"values": theirs, "after": after}.items():
        found, wanted = torch.cat(one_process[name]), torch.cat(parts)
        nonzero = [t[t != 0].sort().values for t in (found, wanted)]
        assert len(nonzero[0]) == sum(int(s.loss_mask.sum()) for s in few_samples())
        assert (nonzero[0] - nonzero[1]).abs().max() < 1e-5


@pytest.mark.parametrize("layout", ["TP2", *map(release, ("PP2", "EP2", "TP2xCP2", "TP2xPP2xEP2"))])
def test_layout_matches_one_process(
    layout: str, model_path: Path, one_process: dict[str, Any], tmp_path: Path
) -> None:
    world, sizes = LAYOUTS[layout]
    outs = run_ranks(
        world, exercise, model_path, sizes, few_samples(), 2, tmp_path / "c", folder=tmp_path
    )
    ours, last = outs[0], outs[-1]
    assert torch.equal(ours["start"], one_process["start"])
    if "expert" not in sizes:  # all samples are on every rank, in some order of packing
        for name in ("values", "after"):
            found, wanted = (torch.cat(out[name]) for out in (last, one_process))
            nonzero = [t[t != 0].sort().values for t in (found, wanted)]
            assert (nonzero[0] - nonzero[1]).abs().max() < TOLERANCE
    for recompute in (False, True):
        for mine, theirs in zip(
            ours[f"steps/{recompute}"], one_process["steps/False"], strict=True
        ):
            for key in ("loss/value", "grad_norm", "value/mean", "value/squared_error"):
                assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE), key
        assert distance(ours[f"weights/{recompute}"], one_process["weights/False"]) < TOLERANCE


def test_the_head_learns_its_target(model_path: Path, tmp_path: Path) -> None:
    out = run_ranks(1, learns, model_path, few_samples()[:4], 25, folder=tmp_path)[0]
    assert out["errors"][-1] < 0.5 * out["errors"][0]
    assert not torch.equal(out["head"], out["start"])


def test_value_loss_by_hand() -> None:
    values = torch.tensor([9.0, 1.0, 2.0, float("nan"), 0.0], requires_grad=True)
    mask = torch.tensor([False, True, True, False, True])
    out = value_loss(
        values,
        torch.tensor([0.0, 0.0, 2.1, 0.0, 0.0]),  # the first token moved by 1, further than 0.5
        torch.tensor([0.0, 1.5, 4.0, 0.0, -1.0]),
        mask,
        torch.tensor([0, 3, 5], dtype=torch.int32),
        torch.tensor([0.5, 2.0]),
        clip=0.5,
    )
    # token 1: max(0.5^2, (0.5 - 1.5)^2) = 1; token 2: (2 - 4)^2 = 4; token 4: 1
    assert float(out.loss_sum.detach()) == pytest.approx(0.5 * (0.5 * (1 + 4) + 2.0 * 1))
    assert float(out.stats["value/clip_frac"].total) == 1  # pyright: ignore
    out.loss_sum.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 0.0, -1.0, 0.0, 2.0]  # where the clip binds, no gradient


def tied(model_path: Path) -> None:
    """A tied model has an output weight to share; its critic must not."""
    critic = build(model_path, join_mesh(model_path, {}), Ledger(torch.device("cpu")))
    names = exported(critic)
    assert VALUE_HEAD in names
    assert "lm_head.weight" not in names


def test_a_tied_model_makes_a_critic(tied_model_path: Path, tmp_path: Path) -> None:
    run_ranks(1, tied, tied_model_path, folder=tmp_path)
