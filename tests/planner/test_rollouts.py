"""The plan's bytes of rollouts against what the functions of a run make of synthetic samples."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.scaling import read_model
from benchmarks.world_step import Case, layout, move, share_groups
from mrl.planner.report import rollout_table
from mrl.planner.rollouts import rollout_bytes
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

WORK = Workload(prompts=32, samples=8, prompt_len=64, response_len=448, engine_tp=4)


@pytest.mark.parametrize(
    "dims", [layout(64, 4, 1, 8), layout(64, 2, 4, 8)], ids=ParallelDims.describe
)
def test_bytes_of_groups_tokens_and_routes(dims: ParallelDims) -> None:
    case = Case("qwen3_30b_a3b", dims, WORK)
    shape = read_model(case.model)
    shared, groups = share_groups(case, shape)
    moved = move(case, shape, groups)
    _, outlines, tokens, routes, texts = rollout_bytes(shape, dims, WORK)
    assert shared["now"]["rank_receives"] == pytest.approx(outlines.rank, rel=0.15)
    assert moved["tokens"]["rank_receives"] == pytest.approx(tokens.rank, rel=0.1)
    assert moved["tokens"]["leader_sends"] == pytest.approx(
        tokens.leader, rel=0.25
    )  # of few samples
    assert moved["routes"]["rank_receives"] == pytest.approx(routes.rank, rel=0.1)
    assert moved["routes"]["leader_sends"] == pytest.approx(routes.leader, rel=0.25)
    assert texts.rank == 0 < texts.first
    assert shared["now"]["held_of_others"] < 0.1 * shared["before"]["held_of_others"]
    table = rollout_table(shape, dims, WORK)
    assert [row[0] for row in table.rows] == [
        "routes from the engine to its leader (in memory)", "outlines of all groups",
        "tokens and log-probs", "routes of the layers that a rank trains",
        "lines of rollouts/*.jsonl",
    ]  # fmt: skip


def test_one_rank_shares_nothing() -> None:
    shape = read_model("qwen3_30b_a3b")
    work = dataclasses.replace(WORK, engine_tp=1)
    (alone,) = rollout_bytes(shape, layout(1, 1, 1, 1), work)
    assert alone.leader == WORK.num_tokens * 48 * 8
