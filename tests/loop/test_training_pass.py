"""benchmarks/training_pass.py compares passes that compute the same. No timings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from benchmarks import training_pass
from mrl.config import load_recipe
from mrl.preflight import check
from mrl.toy_model import write_toy_model
from parallel.mesh import init_mesh
from tests.ranks import run_ranks


def measured(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    write_toy_model(folder / "model")
    keys = [f"model.path={folder}/model", f"output_dir={folder}/run", "rollout.prompts_per_step=2"]
    plan = check(load_recipe(training_pass.RECIPE, keys), 1)
    return training_pass.measure(plan, init_mesh(plan.dims, 0), num_pairs=1)


def test_both_sides_compute_the_same(tmp_path: Path) -> None:
    (result,) = run_ranks(1, measured, tmp_path, folder=tmp_path / "ranks")
    assert result["largest_logprob_difference"] < 1e-5
    assert result["relative_grad_norm_difference"] < 1e-5
    assert set(result["passes"]) == {"logprob", "train"}
    for table in result["passes"].values():
        assert table["cpu_s"]["mrl"] > 0
        assert table["cpu_s"]["transformers"] > 0

    in_time = copy.deepcopy(result)
    for table in in_time["passes"].values():
        table["cpu_s"]["ratio"] = 1.0
    assert training_pass.failures(in_time) == []
    for key in ("largest_logprob_difference", "relative_grad_norm_difference"):
        assert len(training_pass.failures({**in_time, key: 0.1})) == 1
    in_time["passes"]["train"]["cpu_s"]["ratio"] = 1.51
    assert training_pass.failures(in_time)[0].startswith("train: 1.51 times the CPU seconds")
