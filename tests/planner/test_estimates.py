"""Activations within a stated range, Megatron's own layers of each stage, and arithmetic."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mrl.config import ModelConfig, OptimizerConfig, load_recipe
from mrl.planner import activations, cost, engine, host, memory
from mrl.planner.attention import Indexer
from mrl.planner.hardware import HARDWARE
from mrl.planner.shape import ModelShape, read_shape
from mrl.planner.stages import split_layers, stages
from mrl.planner.verdict import verdict
from mrl.planner.workload import Workload, recipe_workload
from parallel.context import context_slice
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.layers.attention import packed_sequences
from parallel.packing import WeightedSample, pack
from parallel.policy import Policy
from tests.loop.conftest import TOY_RECIPE
from tests.parallel.conftest import make_sample, write_model
from tests.parallel.counted import KeptBytes
from tests.parallel.layouts import join_mesh
from tests.ranks import run_ranks

TWO_STEPS = ["train.num_steps_per_rollout=2"]
MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
WORK = Workload(prompts=8, samples=1, prompt_len=32, response_len=32, micro_batch_tokens=64)


def policy_of(path: Path, sizes: dict[str, int], dtype: str) -> Policy:
    return Policy(
        HfModel.read(path),
        join_mesh(path, sizes),
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
    group = policy.mesh.cp
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
    predicted = sum(activations.layer_activation_bytes(shape, n, 64, work) for n in range(4))
    print(f"{dtype}: measured {measured}, predicted {predicted}: {measured / predicted:.3f}")
    # The formula is for fused layers; these are unfused, on a CPU.
    assert 1.2 < measured / predicted < 2.0


def shape_of(name: str) -> ModelShape:
    return read_shape(json.loads((MODELS / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [
        (8, {"pp": 2}),
        (61, {"pp": 8, "last_layers": 5}),
        (12, {"pp": 3, "vpp": 2, "first_layers": 2, "last_layers": 6}),
        (4, {"pp": 2, "first_layers": 1, "last_layers": 3}),
    ],
)
def test_layers_of_stages_are_those_that_megatron_builds(num_layers: int, sizes: dict) -> None:
    dims = ParallelDims(**{"world": 8, "tp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, **sizes})
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=dims.first_layers,
        num_layers_in_last_pipeline_stage=dims.last_layers,
    )
    for rank, chunks in enumerate(split_layers(num_layers, dims)):
        for chunk, layers in enumerate(chunks):
            place = {"vp_stage": chunk if dims.vpp > 1 else None, "pp_rank": rank}
            assert layers.start == get_transformer_layer_offset(config, **place)
            assert len(layers) == get_num_layers_to_build(config, **place)


def test_micro_batches_of_stages() -> None:
    dims = ParallelDims(world=4, tp=1, pp=4, vpp=1, cp=1, ep=1, etp=1)
    assert [activations.in_flight(stage, dims, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert activations.in_flight(0, dims, 2) == 2
    twice = dataclasses.replace(dims, vpp=2)
    assert [activations.in_flight(stage, twice, 16) for stage in range(4)] == [11, 9, 7, 5]
    assert cost.pipeline_bubble(twice, 8) == 3 / 16


def test_the_exports_buffer_holds_a_bucket_or_the_largest_parameter() -> None:
    shape = shape_of("qwen3_30b_a3b")
    embedding, peers = 2 * 151936 * 2048, 8 * 2 * 2 * 2048 * 768
    dims = ParallelDims(world=8, tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1)
    assert peers < embedding == memory.largest_export(shape, dims, WORK)
    assert (
        memory.export_bytes(shape, dims, WORK) == 3 * embedding
    )  # two buffers and the peers' pieces
    larger = dataclasses.replace(WORK, bucket_bytes=1 << 30)
    assert memory.export_bytes(shape, dims, larger) == (2 << 30) + embedding
    alone = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
    assert memory.export_bytes(shape, alone, larger) == 2 << 30
    whole = dataclasses.replace(WORK, bucket_bytes=1 << 40)
    assert memory.export_bytes(shape, alone, whole) == 2 * shape.num_parameters  # one bucket


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
    assert engine.kv_bytes_per_token(shape, WORK) == 2 * 48 * 2 * 4 * 128
    latent = shape_of("deepseek_v3")
    assert engine.kv_bytes_per_token(latent, WORK) == 2 * 61 * (512 + 64)
    sparse = dataclasses.replace(latent, indexer=Indexer(7168, 1536, 64, 128, 2048))
    assert engine.kv_bytes_per_token(sparse, WORK) == 61 * (2 * (512 + 64) + 132)


def test_rotary_tables_hold_the_positions_of_a_context_parallel_rank() -> None:
    latent = shape_of("deepseek_v3")
    for cp, numel in ((1, 4096 * 64), (2, 2048 * 64)):
        dims = ParallelDims(world=cp, tp=1, pp=1, vpp=1, cp=cp, ep=1, etp=1)
        (stage,) = stages(latent, dims)
        assert host.rotary_tables(latent, stage, dims) == (2 * 61, numel)


def test_the_advice_is_none_that_would_be_refused() -> None:
    shape = shape_of("qwen3_30b_a3b")
    dims = ParallelDims(world=8, tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1)
    work = Workload(prompts=64, samples=8, prompt_len=512, response_len=4096, weight_bytes=4,
                    micro_batch_tokens=9216, distributed_optimizer=True, engine_tp=4)  # fmt: skip
    small = HARDWARE["h100"]
    # The distributed optimizer gives views of fp32 weights, which cannot be stepped on the host.
    text = verdict(shape, dims, work, small).text
    assert "what helps most is " in text
    assert "optimizer_cpu_offload" not in text
    long = dataclasses.replace(work, micro_batch_tokens=65536, weight_bytes=2,
                               recompute_modules=("core_attn",))  # fmt: skip
    text = verdict(shape, dims, long, HARDWARE["h200"]).text
    assert "train.recompute=true in place of megatron.recompute_granularity (saves" in text


@pytest.mark.parametrize(("replay", "steps"), [("r3", "one"), ("r2", "all")])
def test_the_row_of_routes_says_how_many_steps_it_counts(replay: str, steps: str) -> None:
    shape = shape_of("qwen3_30b_a3b")
    dims = ParallelDims(world=8, tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1)
    (stage,) = stages(shape, dims)
    work = dataclasses.replace(WORK, routing_replay=replay)
    rows = memory.pass_rows(shape, stage, dims, work, training=True)
    (text,) = [row.formula for row in rows if row.name == "routes"]
    assert text.startswith(f"expert ids of {steps} optimizer step")


def test_the_verdict_names_phase_bytes_and_the_best_setting() -> None:
    shape = shape_of("qwen3_30b_a3b")
    dims = ParallelDims(world=8, tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1)
    work = Workload(prompts=64, samples=8, prompt_len=512, response_len=4096,
                    micro_batch_tokens=9216, distributed_optimizer=True, engine_tp=4)  # fmt: skip
    gpu = HARDWARE["h200"]
    assert verdict(shape, dims, work, gpu).text.startswith("fits: the peak is rollout")
    small = verdict(shape, dims, work, HARDWARE["h100"])
    assert not small.runs
    assert small.text.startswith("does not fit: train needs ")
    assert ": optimizer 45.9 GB + gradients 16.1 GB + activations " in small.text
    assert "what helps most is megatron.optimizer_cpu_offload=true with" in small.text
    odd = dataclasses.replace(work, engine_tp=12)
    assert verdict(shape, dims, odd, gpu).text.startswith("cannot run: an engine on several nodes")
    full = dataclasses.replace(work, engine_tp=1, engine_share=0.4)
    text = verdict(shape, dims, full, gpu).text
    assert text.startswith("cannot run: rollout.mem_fraction_static 0.4 gives an engine 59.7 GB")
    assert "its weights need 61.1 GB" in text
    # The sharing of the optimizer moves the peak by what it saves of dense moments and weights.
    (stage,) = stages(shape, dims)
    whole = dataclasses.replace(work, distributed_optimizer=False)
    saved = memory.optimizer_bytes(stage, dims, whole) - memory.optimizer_bytes(stage, dims, work)
    assert saved == 12 * stage.dense // 2
    poor = dataclasses.replace(gpu, host_memory_bytes=10**12)
    saves = dataclasses.replace(work, async_save=True)
    text = verdict(shape, dims, saves, poor).text
    assert text.startswith("does not fit: a node needs 1.14 TB of host memory, ")
    assert "asynchronous save 431 GB" in text
    assert "checkpoint.async_save=false, or PYTORCH_ALLOC_CONF=pinned_max" in text


@pytest.mark.parametrize(
    ("overrides", "has_pass"),
    [
        ([], False),
        (TWO_STEPS, True),
        (["train.num_epochs_per_rollout=2"], True),
        ([*TWO_STEPS, "algorithm.name=grpo", "algorithm.old_logprobs=rollout"], False),
        (["guards.min_ess=0.1"], True),
        (["moe.routing_replay=r2"], True),
        (["algorithm.name=ppo"], True),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], True),
        (["algorithm.kl_coef=0.1"], False),
    ],
)  # fmt: skip
def test_the_time_of_old_logprobs_counts_only_with_a_pass_for_them(
    overrides: list[str], has_pass: bool
) -> None:
    shape = shape_of("qwen3_30b_a3b")
    dims = ParallelDims(world=8, tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1)
    work = recipe_workload(load_recipe(TOY_RECIPE, overrides), shape, 64)
    seconds = cost.step_cost(shape, dims, work, HARDWARE["h100"]).seconds
    assert ("old log-probs" in seconds) == has_pass
    assert ("reference log-probs" in seconds) == ("algorithm.kl_coef=0.1" in overrides)
