"""Activations within a stated range, the distributed optimizer within its padding, and arithmetic."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.utils import get_model_config

from mrl.config import ModelConfig, OptimizerConfig, ParallelConfig
from parallel.attention import packed_sequences
from parallel.context import context_slice
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.model import unwrap
from parallel.packing import WeightedSample, pack
from parallel.policy import Policy
from parallel.scaling import cost, memory
from parallel.scaling.report import verdict
from parallel.scaling.shape import ModelShape, read_shape
from parallel.scaling.stages import split_layers, stages
from parallel.scaling.workload import Workload
from tests.parallel.conftest import make_sample, write_model
from tests.parallel.counted import KeptBytes
from tests.parallel.layouts import join_groups
from tests.parallel.test_scaling_bytes import held_bytes
from tests.ranks import run_ranks

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
WORK = Workload(prompts=8, samples=1, prompt_len=32, response_len=32, micro_batch_tokens=64)


def policy_of(path: Path, sizes: dict[str, int], dtype: str) -> Policy:
    return Policy(
        HfModel.read(path),
        join_groups(path, sizes),
        ModelConfig(path=str(path), dtype=dtype),  # pyright: ignore[reportArgumentType]
        OptimizerConfig(lr=1e-3),
        recompute=False,
        temperature=1.0,
    )


def kept_by_a_forward(path: Path, num_tokens: int, dtype: str) -> int:
    policy = policy_of(path, {}, dtype)
    generator = torch.Generator().manual_seed(1)
    batch = pack([WeightedSample(make_sample(generator, num_tokens, 3), 1.0, 1.0)], 1)
    chunk: Any = policy.chunks[0]
    kept = KeptBytes(chunk.parameters())
    group = policy.groups.cp
    for replay in policy.runner.replays.values():
        replay.begin_forward(None, with_grad=False)
    with kept.hooks:
        chunk(
            batch.input_ids.unsqueeze(0),
            batch.position_ids.unsqueeze(0),
            None,
            packed_seq_params=packed_sequences(
                batch.cu_seqlens,
                context_slice(batch.cu_seqlens, group, torch.device("cpu")),
                torch.device("cpu"),
            ),
        )
    return kept.total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_near_those_of_a_real_forward(dtype: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", hidden_size=128, moe_intermediate_size=64,
                       intermediate_size=256, head_dim=32, num_experts=4)  # fmt: skip
    measured = run_ranks(1, kept_by_a_forward, path, 64, dtype, folder=tmp_path / "out")[0]
    shape = read_shape(json.loads((path / "config.json").read_text()))
    work = dataclasses.replace(WORK, weight_bytes=4 if dtype == "float32" else 2)
    predicted = sum(memory.layer_activation_bytes(shape, n, 64, work) for n in range(4))
    print(f"{dtype}: measured {measured}, predicted {predicted}: {measured / predicted:.3f}")
    # The formula is for fused layers; these are unfused, on a CPU.
    assert 1.4 < measured / predicted < 2.4


def distributed_optimizer(path: Path, sizes: dict[str, int], dtype: str) -> dict[str, Any]:
    """Megatron's own, on this rank's chunks: what it holds after a step."""
    policy = policy_of(path, sizes, dtype)
    config = get_model_config(policy.chunks[0])
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = [DistributedDataParallel(config, ddp, c.module) for c in policy.chunks]
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=dtype == "bfloat16",
        params_dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
    optimizer.step()
    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    return {
        **held_bytes(chunks, optimizer),
        "parameters": len(list(unwrap(chunks[0]).parameters())),
        "buckets": sum(len(b.buckets) for b in buffers),
    }


@pytest.mark.parametrize(
    ("world", "sizes", "dtype"),
    [
        (2, {}, "bfloat16"),
        (2, {"expert": 2}, "bfloat16"),
        (4, {"tensor": 2, "expert": 2}, "float32"),
    ],
)
def test_the_distributed_optimizer_shares_its_state_out(
    world: int, sizes: dict[str, int], dtype: str, model_path: Path, tmp_path: Path
) -> None:
    ranks = run_ranks(world, distributed_optimizer, model_path, sizes, dtype, folder=tmp_path)
    shape = read_shape(json.loads((model_path / "config.json").read_text()))
    config = ParallelConfig(**{f"{name}_model_parallel_size": n for name, n in sizes.items()})
    dims = ParallelDims.create(config, world)
    work = dataclasses.replace(
        WORK, distributed_optimizer=True, weight_bytes=4 if dtype == "float32" else 2
    )
    (stage,) = stages(shape, dims)
    predicted = memory.optimizer_bytes(stage, dims, work)
    whole = memory.optimizer_bytes(
        stage, dims, dataclasses.replace(work, distributed_optimizer=False)
    )
    for rank in ranks:
        bound = memory.padding_bound(rank["parameters"], rank["buckets"], dims.dp)
        extra = rank["gradients"] - memory.gradient_bytes(stage)
        assert 0 <= extra <= bound
        # Up to 3 fp32 numbers an element: shares are cut from the padded buffer.
        assert abs(rank["optimizer"] - predicted) <= 3 * bound
        print(f"{sizes} {dtype}: optimizer {rank['optimizer']}, predicted {predicted}, "
              f"unshared {whole}; padding of gradients {extra} <= {bound}")  # fmt: skip
    assert sum(rank["optimizer"] for rank in ranks) == world * predicted
    assert predicted < 0.9 * whole


def shape_of(name: str) -> ModelShape:
    return read_shape(json.loads((MODELS / f"{name}.json").read_text()))


def test_layers_and_micro_batches_of_stages() -> None:
    assert split_layers(4, 2, 2) == [[range(0, 1), range(2, 3)], [range(1, 2), range(3, 4)]]
    assert [len(chunks[0]) for chunks in split_layers(61, 8, 1)] == [8] * 7 + [5]
    dims = ParallelDims(world=4, tp=1, pp=4, vpp=1, cp=1, ep=1, etp=1)
    assert [memory.in_flight(stage, dims, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert memory.in_flight(0, dims, 2) == 2
    twice = dataclasses.replace(dims, vpp=2)
    assert [memory.in_flight(stage, twice, 16) for stage in range(4)] == [11, 9, 7, 5]
    assert cost.pipeline_bubble(twice, 8) == 3 / 16


def test_flops_and_experts_by_hand() -> None:
    shape = shape_of("qwen3_30b_a3b")
    active = shape.num_active - shape.count()["embedding"] - shape.count()["norms"]
    assert cost.model_flops(shape, 0) == 2 * active
    # Scores and sums over 1,000 tokens: 2 x 2 x 32 heads x 128 in each of 48 layers.
    assert cost.model_flops(shape, 1000) - 2 * active == 48 * 4 * 1000 * 4096
    dims = ParallelDims(world=4, tp=1, pp=4, vpp=1, cp=1, ep=4, etp=1)
    parts = sum(cost.stage_flops(shape, stage, 1000) for stage in stages(shape, dims))
    assert parts == cost.model_flops(shape, 1000)
    assert cost.distinct_experts(128, 8, 1) == pytest.approx(8)
    assert cost.distinct_experts(128, 8, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert cost.distinct_experts(128, 8, 1e4) == pytest.approx(128)
    assert memory.kv_bytes_per_token(shape, WORK) == 2 * 48 * 2 * 4 * 128
    latent = shape_of("deepseek_v3")
    assert memory.kv_bytes_per_token(latent, WORK) == 2 * 61 * (512 + 64)


def test_the_verdict_names_phase_bytes_and_the_best_setting() -> None:
    shape = shape_of("qwen3_30b_a3b")
    dims = ParallelDims(world=8, tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1)
    work = Workload(prompts=64, samples=8, prompt_len=512, response_len=4096,
                    micro_batch_tokens=9216, distributed_optimizer=True, engine_tp=4)  # fmt: skip
    gpu = cost.HARDWARE["h100"]
    text = verdict(shape, dims, work, gpu)
    assert text.startswith("does not fit: train on pipeline stage 0 needs ")
    assert "train.recompute=true" in text
    lean = dataclasses.replace(work, recompute=True)
    assert verdict(shape, dims, lean, gpu).startswith("fits: the peak is train")
    # The sharing of the optimizer moves the peak by what it saves of dense moments and weights.
    (stage,) = stages(shape, dims)
    whole = dataclasses.replace(lean, distributed_optimizer=False)
    saved = memory.optimizer_bytes(stage, dims, whole) - memory.optimizer_bytes(stage, dims, lean)
    assert saved == 12 * stage.dense // 2
