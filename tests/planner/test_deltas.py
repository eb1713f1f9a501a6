"""The planned bytes of a delta against real ones, and when a delta is said to pay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mrl.kernels.weight_delta import CHUNK, PIECE_BYTES, TORCH_PIECE, encode
from mrl.planner import cost, report, roles
from mrl.planner.deltas import copy_seconds, delta_bytes, delta_cost
from mrl.planner.hardware import HARDWARE
from mrl.planner.rows import Row
from mrl.planner.shape import read_shape
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
GPU = HARDWARE["h100"]
DIMS = ParallelDims(world=8, tp=1, pp=1, vpp=1, cp=1, ep=8, etp=1)
WORK = Workload(8, 1, 100, 100, rollout_ranks=8, engine_tp=4, staged_versions=1)
DELTAS = dataclasses.replace(WORK, full_sync_every=20)
SHAPE = read_shape(json.loads((MODELS / "qwen3_30b_a3b.json").read_text()))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("changed", [0.0, 0.001, 0.01, 0.1, 0.3])
def test_planned_bytes_are_near_those_of_a_real_delta(size: int, changed: float) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = {2: torch.int16, 4: torch.int32}[size]
    old = torch.zeros(32 * CHUNK, dtype=bits)
    new = (torch.rand(old.shape, generator=generator) < changed).to(bits)
    payload = encode(old.view(torch.uint8), new.view(torch.uint8), size, 1 << 40).payload
    assert payload is not None
    assert delta_bytes(old.nbytes, size, changed) == pytest.approx(payload.numel(), rel=0.05)


def test_a_delta_pays_below_the_speed_of_its_comparison_and_proof() -> None:
    near = delta_cost(SHAPE, DIMS, WORK, GPU)
    assert near.delta_bytes < 0.02 * near.full_bytes
    for link in (0.9, 1.1):
        at = near.break_even * link / cost.EFFICIENCY.links
        gpu = dataclasses.replace(GPU, network=at)
        found = delta_cost(SHAPE, DIMS, WORK, gpu)
        assert found.break_even == pytest.approx(near.break_even)
        assert (found.delta_s < found.full_s) == (link < 1)
    slower = delta_cost(SHAPE, DIMS, dataclasses.replace(WORK, staged_versions=2), GPU)
    assert slower.break_even < near.break_even  # the base is copied


def test_float32_has_no_delta_that_pays() -> None:
    found = delta_cost(SHAPE, DIMS, dataclasses.replace(WORK, weight_bytes=4), GPU)
    assert found.delta_bytes == found.full_bytes
    assert found.delta_s > found.full_s
    assert found.break_even == 0


def test_quantised_weights_have_small_deltas_from_every_dtype() -> None:
    """A step of 1e-6 changes all float32 weights, and few of their fp8 values."""
    quantized = dataclasses.replace(WORK, quantized=True)
    plain = delta_cost(SHAPE, DIMS, WORK, GPU)
    for weight_bytes, most in ((2, 0.03), (4, 0.12)):  # of float32, embeddings change throughout
        work = dataclasses.replace(quantized, weight_bytes=weight_bytes)
        found = delta_cost(SHAPE, DIMS, work, GPU)
        assert found.full_bytes < 0.6 * plain.full_bytes
        assert 0.01 < found.delta_bytes / found.full_bytes < most
        assert found.break_even > 0


def test_only_a_recipe_with_deltas_plans_for_them() -> None:
    def names(work: Workload) -> dict[str, Row]:
        (node, *_) = roles.nodes(SHAPE, DIMS, work, GPU)
        return {row.name: row for row in node.rows}

    def compared(work: Workload) -> set[int]:
        found = [p for p in roles.all_phases(SHAPE, DIMS, work, GPU) if p.name == "sync"]
        rows = [row for phase in found for row in phase.device]
        return {row.num_bytes for row in rows if row.name == "comparison for deltas"}

    assert compared(DELTAS) == {PIECE_BYTES * TORCH_PIECE}
    assert not any(compared(WORK))
    both = delta_cost(SHAPE, DIMS, DELTAS, GPU)
    host = names(DELTAS).keys() - names(WORK).keys()
    assert host == {"last exported version, for deltas"}
    # Two engines, so two of the eight trainer ranks send.
    assert names(DELTAS)[host.pop()].num_bytes == 2 * both.full_bytes
    assert copy_seconds(SHAPE, DIMS, WORK, GPU) == both.full_s
    assert both.delta_s < copy_seconds(SHAPE, DIMS, DELTAS, GPU) != both.full_s


def test_the_plan_says_when_a_delta_pays() -> None:
    slow = dataclasses.replace(GPU, network=1e9)
    for gpu, verdict in (
        (slow, "B/s a link: faster on this run's 700 MB/s"),
        (GPU, "not faster on"),
    ):
        work = dataclasses.replace(WORK, staged_versions=2)
        (table,) = [
            t for t in report.tables(SHAPE, DIMS, work, gpu) if "weight_encoding" in t.title
        ]
        assert verdict in " ".join(" ".join(row) for row in table.rows)
    colocated = dataclasses.replace(WORK, rollout_ranks=0, staged_versions=0)
    assert not any("weight_encoding" in t.title for t in report.tables(SHAPE, DIMS, colocated, GPU))
