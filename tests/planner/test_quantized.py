"""The copy of the weights that measurements of quantised engines make, beside a real policy's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernel_bench.timing import peak_bytes
from mrl.planner.hardware import HARDWARE
from mrl.planner.memory import PROOF_BYTES, export_bytes
from mrl.planner.quantized import BUCKET_BYTES, NOISE_BYTES, replacement_rows
from mrl.planner.roles import all_phases
from mrl.planner.shape import read_shape
from mrl.planner.stages import stages
from mrl.planner.workload import Workload
from mrl.quantization import SCHEMES, is_quantized, with_rounding_noise
from mrl.system.shared_memory import SharedMemory
from mrl.weight_sync.quantize import _held
from parallel import policy as policy_module
from parallel import quantized
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from tests.parallel.layouts import Layout, build, join_mesh, parallel_config
from tests.parallel.models import write_tiny
from tests.ranks import run_ranks

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
WORK = Workload(prompts=8, samples=1, prompt_len=8, response_len=8, weight_bytes=4, quantized=True)
LAYOUTS = [Layout(1), Layout(2, {"tensor": 2, "expert_tensor": 2}), Layout(2, {"pipeline": 2})]
COPY = "copy of the quantised weights"


def copied(path: Path, layout: Layout) -> dict[str, int]:
    """Return the bytes of the originals that a rank keeps while its weights are replaced."""
    mesh = join_mesh(path, layout.sizes)
    policy = build(path, mesh, layout.recompute)
    originals: list[tuple[Tensor, Tensor]] = []

    def replaced(name: str, weight: Tensor) -> Tensor:
        return weight.clone() if is_quantized(name, weight.dim()) else weight

    quantized._replace(policy.weights, replaced, 1 << 20, SharedMemory(), None, originals)
    return {"stage": mesh.pp_rank, "bytes": sum(kept.nbytes for _, kept in originals)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_copy_is_that_of_a_real_policy(layout: Layout, tmp_path: Path) -> None:
    path = write_tiny("qwen3_moe", tmp_path / "model")
    shape = read_shape(HfModel.read(path).config)
    dims = ParallelDims.create(parallel_config(layout.sizes), layout.world)
    ranks = run_ranks(layout.world, copied, path, layout, folder=tmp_path / "ranks")
    for stage in stages(shape, dims):
        row, _ = replacement_rows(shape, stage, dims, WORK)
        assert row.name == COPY
        mine = {rank["bytes"] for rank in ranks if rank["stage"] == stage.index}
        assert mine == {row.num_bytes}


def phases(path: Path, **changes: Any) -> dict[str, dict[str, int]]:
    shape = read_shape(HfModel.read(path).config)
    dims = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
    work = dataclasses.replace(WORK, **changes)
    return {
        phase.name: {row.name: row.num_bytes for row in phase.device}
        for phase in all_phases(shape, dims, work, HARDWARE["h100"])
    }


def test_phases_that_hold_the_copy(tmp_path: Path) -> None:
    """Before the engine wakes only the weights stay; the decomposition has all of the trainer."""
    path = write_tiny("qwen3_moe", tmp_path / "model")
    plain = phases(path, quantized=False, decomposes=True)
    assert not any(COPY in rows for rows in plain.values())
    assert "canaries" not in plain
    found = phases(path)
    assert [name for name, rows in found.items() if COPY in rows] == ["canaries"]
    assert "optimizer" not in found["canaries"]
    assert "engine weights" not in found["canaries"]
    decomposed = phases(path, decomposes=True)
    assert [name for name, rows in decomposed.items() if COPY in rows] == ["canaries", "log-probs"]
    assert "optimizer" in decomposed["log-probs"]
    apart = phases(path, rollout_ranks=1)
    assert {"optimizer", COPY} <= apart["canaries"].keys()


def test_a_bucket_of_embeddings_is_copied_whole() -> None:
    """The output layer and the embedding are the largest tensors of a model, and stay in bfloat16."""
    shape = read_shape(json.loads((MODELS / "qwen3_30b_a3b.json").read_text()))
    dims = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
    embedding = 2 * 151936 * 2048
    for bucket_bytes in (256 << 20, 1 << 40):
        work = dataclasses.replace(WORK, weight_bytes=2, bucket_bytes=bucket_bytes)
        plain = export_bytes(shape, dims, dataclasses.replace(work, quantized=False))
        more = export_bytes(shape, dims, work) - plain - PROOF_BYTES * 2048 * 5120
        if bucket_bytes < embedding:
            assert more == 2 * embedding
        else:
            assert more == work.encoded_bytes(shape)


def test_the_constants_are_those_of_the_code() -> None:
    assert policy_module.BUCKET_BYTES == BUCKET_BYTES
    weight = torch.randn(512, 768).bfloat16()
    name = "model.layers.0.self_attn.q_proj.weight"
    for scheme in SCHEMES.values():
        peak = peak_bytes(
            lambda scheme=scheme: {"w": with_rounding_noise(scheme, name, weight)}, weight.device
        )
        assert 0.5 * NOISE_BYTES < peak / weight.numel() <= NOISE_BYTES
        quantized, scales = scheme.quantize(weight)
        views = {name: quantized, name + scheme.suffix: scales}
        peak = peak_bytes(
            lambda scheme=scheme, views=views: dict(_held({name: weight}, views, scheme)),
            weight.device,
        )
        assert 0.5 * PROOF_BYTES < peak / weight.numel() <= PROOF_BYTES
