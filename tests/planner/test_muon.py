"""Muon in the plan: bytes, traffic and time by arithmetic; test_bytes.py measures them."""

from __future__ import annotations

import json
from pathlib import Path

from mrl.planner.communication import volumes
from mrl.planner.cost import update_seconds
from mrl.planner.hardware import HARDWARE
from mrl.planner.memory import optimizer_bytes, trainer_rows
from mrl.planner.muon import muon_rows, newton_schulz_flops
from mrl.planner.shape import read_shape
from mrl.planner.stages import stages
from mrl.planner.state import StateOptions
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3_30b_a3b.json"
SHAPE = read_shape(json.loads(MODEL.read_text()))


def work(*, muon: bool, distributed: bool = False) -> Workload:
    state = StateOptions(muon=muon)
    return Workload(8, 8, 512, 512, state=state, distributed_optimizer=distributed)


def test_a_matrix_has_eight_bytes_of_state_and_all_else_twelve() -> None:
    dims = ParallelDims(world=8, tp=1, pp=1, vpp=1, cp=1, ep=8, etp=1)
    (stage,) = stages(SHAPE, dims)
    hidden, vocab, layers = 2048, 151936, 48
    router, norms = 128 * hidden, 2 * hidden + 2 * 128
    others = 2 * vocab * hidden + hidden + layers * (router + norms)
    matrices = stage.num_trained - others
    assert optimizer_bytes(stage, dims, work(muon=False)) == 12 * stage.num_trained
    assert optimizer_bytes(stage, dims, work(muon=True)) == 8 * matrices + 12 * others
    (row,) = muon_rows(stage, work(muon=True))
    assert row.num_bytes == 16 * (32 + 2 * 4) * 128 * hidden  # queries, keys and values
    assert muon_rows(stage, work(muon=False)) == []


def test_ranks_that_divide_the_state_have_about_equal_shares() -> None:
    dims = ParallelDims(world=16, tp=1, pp=1, vpp=1, cp=1, ep=8, etp=1)
    (stage,) = stages(SHAPE, dims)
    whole = optimizer_bytes(stage, dims, work(muon=True))
    share = optimizer_bytes(stage, dims, work(muon=True, distributed=True))
    expert_half = 8 * stage.expert // 2
    assert whole / 16 < share - expert_half < whole / 4  # the embedding stays whole
    names = [
        row.name for row in trainer_rows(SHAPE, stage, dims, work(muon=True, distributed=True))
    ]
    padding = trainer_rows(SHAPE, stage, dims, work(muon=True, distributed=True))[-1]
    assert names[-1] == "padding"
    assert padding.num_bytes == 0  # no flattened buffers


def test_the_update_takes_longer() -> None:
    dims = ParallelDims(world=8, tp=2, pp=1, vpp=1, cp=1, ep=8, etp=1)
    held = stages(SHAPE, dims)
    one = 5 * (4 * 768 * 768 * 2048 + 2 * 768**3)
    two = 5 * (4 * 1536 * 1536 * 2048 + 2 * 1536**3)
    experts = 48 * 16 * (one + two)
    flops = newton_schulz_flops(SHAPE, held[0], dims, work(muon=True))
    assert experts < flops < 1.5 * experts
    assert newton_schulz_flops(SHAPE, held[0], dims, work(muon=False)) == 0
    gpu = HARDWARE["h100"]
    adam, muon = (update_seconds(SHAPE, dims, work(muon=m), gpu, held) for m in (False, True))
    assert adam < muon
    gathered = {v.name: v.update for v in volumes(SHAPE, dims, work(muon=True), held[0])}
    attention = 48 * 2048 * 128 * (32 + 2 * 4 + 32)
    assert gathered["gather for Muon"] == 2 * attention / 2  # bf16, half of it from the other rank
    assert "gather for Muon, experts" not in gathered
