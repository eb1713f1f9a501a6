"""Every layout against one process: weights in and out bit-equal, and the same training steps.

One launch per layout checks HF -> Megatron -> HF, log-probs, two optimizer steps with and without
recompute, replay coverage and bitwise checkpoint resume.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrl.algorithms import gspo
from mrl.batching import make_train_batch
from mrl.config import AlgorithmConfig, ModelConfig, OptimizerConfig, ParallelConfig
from mrl.types import LossOutput, MicroBatch, Sample, TrainBatch
from parallel.checkpoint import Checkpoints
from parallel.dims import ParallelDims
from parallel.groups import Groups, init_groups, world_size
from parallel.hf_config import HfModel
from parallel.policy import Policy, with_old_logprobs
from parallel.reduce import reduce_statistics
from tests.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "DP2": (2, {}),
    "EP2": (2, {"expert": 2}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "TP2xEP2": (2, {"tensor": 2, "expert": 2}),
    "PP2xEP2": (4, {"pipeline": 2, "expert": 2}),
    "TP2xPP2xEP2": (8, {"tensor": 2, "pipeline": 2, "expert": 2}),
}
TOLERANCE = 1e-5


def join_groups(model_path: Path, sizes: dict[str, int]) -> Groups:
    config = ParallelConfig(**{f"{name}_model_parallel_size": n for name, n in sizes.items()})
    dims = ParallelDims.create(config, world_size())
    dims.check_model(HfModel.read(model_path).sizes)
    return init_groups(dims, seed=0)


def build(model_path: Path, groups: Groups, recompute: bool = False) -> Policy:
    return Policy(
        HfModel.read(model_path),
        groups,
        ModelConfig(path=str(model_path)),
        OptimizerConfig(lr=1e-3, weight_decay=0.01, clip_grad=0.05),
        recompute=recompute,
        temperature=0.8,
    )


def exported(policy: Policy) -> dict[str, Tensor]:
    """The whole model under HF names, every name exactly once."""
    pairs = [pair for bucket in policy.export(0, 4096) for pair in bucket.tensors]
    assert len(dict(pairs)) == len(pairs)
    return {name: tensor.clone() for name, tensor in pairs}


def loss(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
    return gspo.loss(logprobs, batch, AlgorithmConfig(clip_low=0.5, clip_high=0.5))


def ready_batch(policy: Policy, groups: Groups, samples: list[Sample]) -> tuple[TrainBatch, dict]:
    """The batch with the log-probs before the update, and the statistics of that pass."""
    advantages = [(-1.0) ** i * (1 + i / 10) for i in range(len(samples))]
    batch = make_train_batch(samples, advantages, gspo, groups, micro_batch_tokens=64)
    before = policy.logprobs(batch.micro_batches, True)
    micro = with_old_logprobs(batch.micro_batches, before)
    return TrainBatch(micro, batch.num_loss_tokens, batch.num_samples), dict(before.routing)


def train(policy: Policy, groups: Groups, samples: list[Sample], steps: int) -> list[dict]:
    batch, _ = ready_batch(policy, groups, samples)
    results = []
    for _ in range(steps):
        out = policy.train_step(batch, loss, True)
        results.append({**reduce_statistics(out.stats), "grad_norm": out.grad_norm})
    return results


def exercise(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], checkpoints: Path
) -> dict[str, Any]:
    """Runs on every rank; only rank 0's answer is read."""
    result: dict[str, Any] = {}
    groups = join_groups(model_path, sizes)
    for recompute in (False, True):
        policy = build(model_path, groups, recompute)
        result["loaded"] = exported(policy)
        batch, routing = ready_batch(policy, groups, samples)
        result["routing"] = reduce_statistics(routing)
        result[f"steps/{recompute}"] = train(policy, groups, samples, 2)
        result[f"weights/{recompute}"] = exported(policy)
    store = Checkpoints(checkpoints, groups, keep=1)
    store.save(2, policy, {"step": 2})
    policy.train_step(batch, loss, True)
    result["uninterrupted"] = exported(policy)
    resumed = build(model_path, groups)
    loaded = store.load(2, resumed)
    resumed.train_step(batch, loss, True)
    result["resumed"] = exported(resumed)
    result["step"] = loaded.trainer["step"]
    return result


@cache
def one_process(model_path: Path, folder: Path) -> dict[str, Any]:
    return run_ranks(
        1, exercise, model_path, {}, all_samples(), folder / "ckpt", folder=folder / "out"
    )[0]


def all_samples() -> list[Sample]:
    from tests.parallel.conftest import make_sample

    generator = torch.Generator().manual_seed(1)
    lengths = [7, 31, 12, 40, 9, 22, 17, 5, 28, 33, 6, 14, 19]
    return [make_sample(generator, n, prompt_len=3) for n in lengths]


@pytest.fixture(scope="module")
def reference(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return one_process(model_path, tmp_path_factory.mktemp("reference"))


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference of a weight matrix."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).norm() / b[k].norm()) for k in b)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_matches_one_process(
    name: str, model_path: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    world, sizes = LAYOUTS[name]
    ours = run_ranks(
        world,
        exercise,
        model_path,
        sizes,
        all_samples(),
        tmp_path / "ckpt",
        folder=tmp_path / "out",
    )[0]

    hf = load_file(model_path / "model.safetensors")
    assert ours["loaded"].keys() == hf.keys()
    assert all(torch.equal(ours["loaded"][k], hf[k]) for k in hf)

    assert ours["routing"] == pytest.approx(reference["routing"], rel=1e-12)
    for recompute in (False, True):
        for mine, theirs in zip(ours[f"steps/{recompute}"], reference["steps/False"], strict=True):
            assert mine["routing/replay_coverage"] == 1.0
            for key in ("loss/policy", "grad_norm", "ratio/mean", "ratio/max"):
                assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE), key
        assert distance(ours[f"weights/{recompute}"], reference["weights/False"]) < TOLERANCE

    assert ours["step"] == 2
    assert distance(ours["uninterrupted"], ours["weights/True"]) > 1e-6
    assert all(torch.equal(ours["resumed"][k], v) for k, v in ours["uninterrupted"].items())


def test_one_process_trains_and_resumes(reference: dict[str, Any], model_path: Path) -> None:
    hf = load_file(model_path / "model.safetensors")
    assert all(torch.equal(reference["loaded"][k], hf[k]) for k in hf)
    first, second = reference["steps/False"]
    assert first["ratio/mean"] == 1.0  # old log-probs are those of the same weights
    assert first["ratio/max"] == 1.0
    assert second["ratio/mean"] != 1.0
    assert second["loss/policy"] < first["loss/policy"]
    assert reference["routing"]["routing/disagreement"] > 0.2  # random routes
    assert distance(reference["weights/False"], reference["loaded"]) > 1e-4
    assert distance(reference["weights/True"], reference["weights/False"]) == 0
    assert all(
        torch.equal(reference["resumed"][k], v) for k, v in reference["uninterrupted"].items()
    )
