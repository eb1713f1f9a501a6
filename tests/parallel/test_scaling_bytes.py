"""The plan's byte formulas against real Policies: tensors that stay, and traffic of a train step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.algorithms import gspo
from mrl.batching import make_train_batch
from mrl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mrl.types import TrainBatch
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.policy import Policy, with_old_logprobs
from parallel.scaling.communication import volumes
from parallel.scaling.memory import gradient_bytes, optimizer_bytes, weight_bytes
from parallel.scaling.shape import read_shape
from parallel.scaling.stages import stages
from parallel.scaling.workload import Workload
from tests.parallel.conftest import make_sample
from tests.parallel.counted import SentBytes
from tests.parallel.layouts import join_groups, loss
from tests.ranks import run_ranks

WORK = Workload(
    prompts=8, samples=1, prompt_len=3, response_len=13, micro_batch_tokens=32, replay=True
)
CASES: dict[str, tuple[int, dict[str, int], str, bool]] = {
    "one process": (1, {}, "float32", False),
    "TP2": (2, {"tensor": 2}, "bfloat16", True),
    "TP2 fp32": (2, {"tensor": 2}, "float32", False),
    "EP2": (2, {"expert": 2}, "bfloat16", True),
    "DP2": (2, {}, "bfloat16", False),
    "PP2": (2, {"pipeline": 2}, "bfloat16", True),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, "float32", False),
    "TP2xEP2": (2, {"tensor": 2, "expert": 2}, "bfloat16", True),
    "TP2xPP2, tied": (4, {"tensor": 2, "pipeline": 2}, "bfloat16", False),
}


def measure(path: Path, sizes: dict[str, int], dtype: str, recompute: bool) -> dict[str, Any]:
    """Runs on every rank: bytes of its tensors, and bytes that it sends in each pass."""
    groups = join_groups(path, sizes)
    policy = Policy(
        HfModel.read(path),
        groups,
        ModelConfig(path=str(path), dtype=dtype),  # pyright: ignore[reportArgumentType]
        OptimizerConfig(lr=1e-3),
        recompute=recompute,
        temperature=1.0,
    )
    generator = torch.Generator().manual_seed(1)
    samples = [make_sample(generator, 16, 3) for _ in range(8)]
    batch = make_train_batch(samples, [1.0, -1.0] * 4, gspo, groups, WORK.micro_batch_tokens)
    with SentBytes() as before:
        old = policy.logprobs(batch.micro_batches, True)
    micro = with_old_logprobs(batch.micro_batches, old)
    with SentBytes() as train:
        policy.train_step(TrainBatch(micro, batch.num_loss_tokens, 8), loss, True)
    return {
        "stage": groups.pp_rank,
        "forward": before.total,
        "step": train.total,
        **held_bytes(policy.chunks, policy.optimizer),
    }


def held_bytes(chunks: list[Any], optimizer: Any) -> dict[str, int]:
    """Bytes of a rank's weights, gradient buffers and of what the optimizer adds to them."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    weights = {p.untyped_storage().data_ptr() for p in parameters}
    state = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = [p for group in part.optimizer.param_groups for p in group["params"]]
        for values in part.optimizer.state.values():
            inner += [t for t in values.values() if torch.is_tensor(t) and t.numel() > 1]
        # An fp32 main weight may be a view of the weight itself.
        state |= {id(t): t for t in inner if t.untyped_storage().data_ptr() not in weights}
    return {
        "weights": total(parameters),
        "gradients": total(b.grad_data for b in buffers),
        "optimizer": total(state.values()),
    }


def total(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def predict(
    path: Path, world: int, sizes: dict[str, int], work: Workload
) -> list[dict[str, float]]:
    """The same numbers from the formulas, by pipeline stage."""
    shape = read_shape(json.loads((path / "config.json").read_text()))
    config = ParallelConfig(**{f"{name}_model_parallel_size": n for name, n in sizes.items()})
    dims = ParallelDims.create(config, world)
    answers = []
    for stage in stages(shape, dims):
        found = volumes(shape, dims, work, stage)
        answers.append(
            {
                "weights": weight_bytes(stage, work),
                "gradients": gradient_bytes(stage),
                "optimizer": optimizer_bytes(stage, dims, work),
                "forward": sum(v.forward for v in found),
                "step": sum(v.step(work.recompute) for v in found),
            }
        )
    return answers


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_real_policy(
    name: str, model_path: Path, tied_model_path: Path, tmp_path: Path
) -> None:
    world, sizes, dtype, recompute = CASES[name]
    path = tied_model_path if "tied" in name else model_path
    ranks = run_ranks(world, measure, path, sizes, dtype, recompute, folder=tmp_path)
    each = 2 if dtype == "bfloat16" else 4
    work = dataclasses.replace(WORK, recompute=recompute, weight_bytes=each)
    for number, answer in enumerate(predict(path, world, sizes, work)):
        mine = [rank for rank in ranks if rank["stage"] == number]
        for key in ("weights", "gradients", "optimizer"):
            assert [rank[key] for rank in mine] == [answer[key]] * len(mine), key
        for key in ("forward", "step"):
            # Routing is uneven by rank, but every row is sent by somebody: the mean is exact.
            mean = sum(rank[key] for rank in mine) / len(mine)
            print(f"{name}: stage {number} {key} measured {mean:.0f}, predicted {answer[key]:.0f}")
            assert mean == pytest.approx(answer[key], rel=1e-12), key
