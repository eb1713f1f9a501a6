"""The frozen reference: exact at the start, never moves, and the policy returns bit for bit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routes import Replay
from mrl.algorithms import grpo
from mrl.config import AlgorithmConfig, ModelConfig, OptimizerConfig
from mrl.learn.batching import make_train_batch
from mrl.types import LossOutput, MicroBatch, Sample, TrainBatch
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.forward import LossFunction
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.policy import Policy, with_old_logprobs, with_ref_logprobs
from parallel.reduce import reduce_statistics
from tests.parallel.conftest import write_model
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import exported, join_mesh
from tests.ranks import run_ranks
from tests.release import release

COEFF = 0.5
Bits = dict[str, Tensor]


def build(
    model_path: Path,
    mesh: Mesh,
    reference: Path | None,
    dtype: str = "float32",
    distributed: bool = False,
) -> Policy:
    return Policy(
        HfModel.read(model_path),
        mesh,
        ModelConfig(path=str(model_path), dtype=dtype),  # pyright: ignore[reportArgumentType]
        OptimizerConfig(lr=1e-3, clip_grad=0, use_distributed_optimizer=distributed),
        recompute=False,
        temperature=1.0,
        reference=HfModel.read(reference) if reference else None,
    )


def kl_loss(**settings: Any) -> LossFunction:
    config = AlgorithmConfig(name="grpo", **settings)

    def loss(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
        return grpo.loss(logprobs, batch, config)

    return loss


def reference_logprobs(policy: Policy, batch: TrainBatch) -> list[Tensor]:
    with policy.reference():
        return policy.forward_only(batch.micro_batches, Replay.rollout).logprobs


def ready(policy: Policy, mesh: Mesh, samples: list[Sample], advantage: float) -> TrainBatch:
    """Make a batch with old log-probs, and reference log-probs if the policy has a reference."""
    signs = [advantage * (-1.0) ** i for i in range(len(samples))]
    batch = make_train_batch(samples, signs, grpo, mesh, micro_batch_tokens=64)
    micro = with_old_logprobs(
        batch.micro_batches, policy.forward_only(batch.micro_batches, Replay.rollout)
    )
    if policy.ledger.where().get("reference"):
        with policy.reference():
            micro = with_ref_logprobs(
                micro, policy.forward_only(batch.micro_batches, Replay.rollout)
            )
    return dataclasses.replace(batch, micro_batches=micro)


def same(a: Bits, b: Bits) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fails_under_the_reference(policy: Policy) -> None:
    with policy.reference():
        raise KeyError("of the caller")


def exercise(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], checkpoints: Path
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)
    policy = build(model_path, mesh, model_path)
    batch = ready(policy, mesh, samples, 1.0)
    first = reference_logprobs(policy, batch)
    for micro, logprobs in zip(batch.micro_batches, first, strict=False):
        assert micro.old_logprobs is not None
        assert torch.equal(micro.old_logprobs, logprobs)
    steps = []
    for _ in range(3):
        out = policy.train_step(batch, kl_loss(kl_coef=COEFF), Replay.rollout)
        steps.append({**reduce_statistics(out.stats), "grad_norm": out.grad_norm})
    before = exported(policy)
    again = reference_logprobs(policy, batch)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert same(exported(policy), before)
    with pytest.raises(KeyError):
        fails_under_the_reference(policy)
    assert same(exported(policy), before)

    resumed = build(model_path, mesh, model_path)
    store = Checkpoints(checkpoints, mesh, keep=1)
    store.save(3, policy, {})
    store.load(3, resumed)
    assert same(exported(resumed), before)
    again = reference_logprobs(resumed, batch)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    where = policy.ledger.where()
    assert where["reference"].device == 0
    assert where["reference"].host == 2 * where["parameters"].device
    return {"steps": steps, "logprobs": first}


@pytest.fixture(scope="module")
def one_process(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reference")
    return run_ranks(1, exercise, model_path, {}, few_samples(), folder / "c", folder=folder)[0]


def test_the_reference_is_the_start_and_stays_it(one_process: dict[str, Any]) -> None:
    kl = [step["kl/ref"] for step in one_process["steps"]]
    assert kl[0] == 0.0
    assert kl[2] > kl[1] > 0


@pytest.mark.parametrize("sizes", [{"pipeline": 2}, release({"tensor": 2, "pipeline": 2})])
def test_stages_give_the_numbers_of_one_process(
    sizes: dict[str, int], model_path: Path, one_process: dict[str, Any], tmp_path: Path
) -> None:
    arguments = (model_path, sizes, few_samples(), tmp_path / "c")
    outs = run_ranks(math.prod(sizes.values()), exercise, *arguments, folder=tmp_path)
    for mine, theirs in zip(outs[0]["steps"], one_process["steps"], strict=True):
        for key in ("kl/ref", "grad_norm", "loss/policy"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key
    for mine, theirs in zip(outs[-1]["logprobs"], one_process["logprobs"], strict=True):
        assert (mine[: len(theirs)] - theirs).abs().max() < 1e-5


def gradients_of_the_penalty(model_path: Path, samples: list[Sample]) -> list[float]:
    """k1 has gradient +1 by each log-prob: that of an advantage of -1 at ratio 1."""
    mesh = join_mesh(model_path, {})
    norms = []
    for reference, advantage in ((model_path, 0.0), (None, -COEFF)):
        policy = build(model_path, mesh, reference)
        batch = make_train_batch(samples, [advantage] * len(samples), grpo, mesh, 64)
        filled = ready(policy, mesh, samples, 0.0)
        micro = [
            dataclasses.replace(m, old_logprobs=f.old_logprobs, ref_logprobs=f.ref_logprobs)
            for m, f in zip(batch.micro_batches, filled.micro_batches, strict=True)
        ]
        loss = kl_loss(kl_coef=COEFF, kl_estimator="k1") if reference else kl_loss()
        ready_batch = dataclasses.replace(batch, micro_batches=micro)
        norms.append(policy.train_step(ready_batch, loss, Replay.rollout).grad_norm)
    return norms


def test_the_penalty_reaches_the_gradient(model_path: Path, tmp_path: Path) -> None:
    run = run_ranks(1, gradients_of_the_penalty, model_path, few_samples(), folder=tmp_path)
    penalty, advantage = run[0]
    assert penalty > 1e-3
    assert penalty == pytest.approx(advantage, rel=1e-6)


def half_precision(model_path: Path, other: Path, samples: list[Sample]) -> dict[str, Any]:
    """bf16 with sharded fp32 main parameters: swapping in another model changes no bit of training."""
    mesh = join_mesh(model_path, {})
    weights, found = [], []
    for swaps in (False, True):
        policy = build(model_path, mesh, other if swaps else None, "bfloat16", True)
        batch = ready(policy, mesh, samples, 1.0)
        for _ in range(2):
            policy.train_step(batch, kl_loss(), Replay.rollout)
            if swaps:
                found = reference_logprobs(policy, batch)
        weights.append(exported(policy))
    theirs = (
        build(other, mesh, None, "bfloat16")
        .forward_only(batch.micro_batches, Replay.rollout)
        .logprobs
    )
    return {
        "same": same(*weights),
        "other": all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True)),
    }


def test_another_folder_as_reference_and_bf16_main_parameters(
    model_path: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", initializer_range=0.1)
    for out in run_ranks(2, half_precision, model_path, other, few_samples(), folder=tmp_path):
        assert out["same"]
        assert out["other"]


def without_a_reference(model_path: Path) -> None:
    policy = build(model_path, join_mesh(model_path, {}), None)
    with pytest.raises(RuntimeError, match="without a reference"), policy.reference():
        pass


def test_no_reference_is_an_error(model_path: Path, tmp_path: Path) -> None:
    run_ranks(1, without_a_reference, model_path, folder=tmp_path)
