"""benchmarks/shared_prefixes.py compares steps that compute the same. No timings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import shared_prefixes
from benchmarks.shared_prefixes import GOAL, LIMIT, Case, Steps, compare, failures
from mrl.toy_model import write_toy_model
from parallel.dims import ParallelDims
from parallel.mesh import init_mesh
from tests.ranks import run_ranks

CASES = (
    Case("named", 60, 8, 4),
    Case("single", 40, 8, 1, prompts=3),
    Case("different", 60, 8, 4, same_routes=False),
)


def rows(folder: Path) -> list[dict[str, Any]]:
    shared_prefixes.SIZES.update(hidden_size=32, moe_intermediate_size=16, head_dim=8)
    mesh = init_mesh(ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1), seed=0)
    write_toy_model(folder / "model", **shared_prefixes.SIZES)
    steps = Steps(folder / "model", mesh)
    return [compare(steps, case, pairs=2) for case in CASES]


def test_both_compute_the_same(tmp_path: Path) -> None:
    (found,) = run_ranks(1, rows, tmp_path, folder=tmp_path / "out")
    named, single, different = found
    assert (named["tokens"], named["rows"]) == (272, 59 + 4 * 9)
    assert single["rows"] == single["tokens"]
    assert different["rows"] == different["tokens"]
    for row in found:
        assert row["off"]["peak_mb"] >= 0
        row["speed"]["cpu_s"] = GOAL + 1
        row["quartiles_of_pairs"] = [0.5, 1.0, 2.0]
        assert failures(row) == []
    named["speed"]["cpu_s"] = GOAL - 0.1
    different["quartiles_of_pairs"][1] = 1 / LIMIT - 0.01
    single["largest_logprob_difference"] = 1.0
    assert [len(failures(row)) for row in found] == [1, 1, 1]
