"""`make quantization`: rows and checks of made-up runs, its jobs, and one real run of each model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import between_markers
from studies.quantization import DOCUMENT, checks, figures_of, jobs, rows_of, table
from studies.quantization_models import SMOLLM, STUDIES
from studies.stability_study.arms import CORRECTIONS

REAL = STUDIES["smollm"]
DENSE, MOE = REAL.models


def made_up(arm: str, seed: int, k3: float, *, is_moe: bool = True) -> dict[str, Any]:
    """A run of 4 steps; replay leaves a tenth of `k3`."""
    native = {"k3": k3, "num_extreme": 3, "num_tokens": 60}
    paired: dict[str, Any] = {"native": native}
    if is_moe:
        paired["replayed"] = {**native, "k3": k3 / 10}
        paired["routes"] = {"disagreement": 0.02, "token_any_layer": 0.5}
    step = {"reward/mean": 0.25, "study/mismatch_extreme": 0.05, "paired": paired}
    return {"arm": arm, "seed": seed, "ended": "done", "steps": [step] * 4}


def real_rows(k3: dict[str, float]) -> list[dict[str, Any]]:
    """The rows of the study of SmolLM2 where the engine in a format has a k3 of k3[format]."""
    rows = []
    for model in REAL.models:
        for name in REAL.formats:
            results = [
                made_up(arm, seed, k3[name] * (1 + seed), is_moe=model.is_moe)
                for seed in range(2)
                for arm in model.arms
            ]
            rows += rows_of(model, name, REAL, results)
    return rows


def test_rows_have_the_figures_that_a_model_has() -> None:
    rows = real_rows({"none": 1e-4, "fp8_block": 1e-2})
    assert [row["model"] for row in rows] == ["dense"] * 4 + ["MoE"] * 8
    assert "disagreement" not in rows[0]
    assert rows[2]["native_k3"] == (0.015, 0.01, 0.02)
    assert rows[-1]["replayed_k3"] == pytest.approx((0.0015, 0.001, 0.002))
    assert rows[-1]["native_extreme"][0] == 0.05
    lines = table(rows, REAL).splitlines()
    assert lines[0].startswith("| model | engine | correction | k3, trainer's own routes |")
    assert len({line.count(" | ") for line in [lines[0], *lines[2:]]}) == 1
    assert lines[2].startswith("| dense | none | off | 0.00015 (0.0001 to 0.0002) | - | - | 0.05")
    (toy,) = STUDIES["toy"].models
    long_enough = [made_up(arm, 0, 1e-3) for arm in toy.arms]
    text = table(rows_of(toy, "int8", STUDIES["toy"], long_enough), STUDIES["toy"])
    assert text.startswith("| engine | correction | k3, trainer's own routes |")


def test_what_must_hold() -> None:
    found = checks(real_rows({"none": 1e-4, "fp8_block": 1e-2}), 0)
    assert found == {
        "every run ended": True,
        "dense fp8_block: k3 is larger than without quantisation": True,
        "MoE fp8_block: k3 is larger than without quantisation": True,
    }
    assert not any(checks(real_rows({"none": 1e-2, "fp8_block": 1e-2}), 1).values())
    (toy,) = STUDIES["toy"].models
    results = [made_up(arm, 0, 1e-3) for arm in toy.arms]
    rows = rows_of(toy, "int8", STUDIES["toy"], results)
    assert checks(rows, 0)["int8: replay lowers k3 of the same rollouts"]
    rows[0]["replayed_k3"] = rows[0]["native_k3"]
    assert not checks(rows, 0)["int8: replay lowers k3 of the same rollouts"]


def test_a_dense_model_is_not_asked_for_routes(tmp_path: Path) -> None:
    dense = jobs(tmp_path, tmp_path / "start", DENSE, "fp8_block", 2, 4)
    assert [(job.arm, job.seed) for job in dense] == [
        ("off", 0),
        ("TIS", 0),
        ("off", 1),
        ("TIS", 1),
    ]
    assert not any(job.is_moe for job in dense)
    assert all("rollout.quantization=fp8_block" in job.more for job in dense)
    moe = jobs(tmp_path, tmp_path / "start", MOE, "none", 1, 4)
    assert [job.arm for job in moe] == list(CORRECTIONS)
    assert figures_of(MOE, REAL) == list(REAL.figures)


def test_the_page_has_a_place_for_each_table() -> None:
    text = DOCUMENT.read_text()
    for study in STUDIES.values():
        assert between_markers(text, study.marker, "| a | row |").count("| a | row |") == 1


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SMOLLM.exists(), reason="make smollm makes runs/smollm")
@pytest.mark.parametrize("model", ["dense", "MoE"])
def test_one_step_of_the_real_model(model: str, tmp_path: Path) -> None:
    """The second call makes no run."""
    keys = ("--only", model, "--formats", "fp8_block", "--seeds", "1", "--steps", "1")
    command = [sys.executable, "-W", "ignore", "-m", "studies.quantization", "--model", "smollm"]
    for num_made in (len(DENSE.arms) if model == "dense" else len(MOE.arms), 0):
        done = subprocess.run(
            [*command, *keys, "--folder", str(tmp_path)], cwd=ROOT, env=dict(os.environ),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert (
            done.stdout.count(f"{model} fp8_block") - done.stdout.count("| fp8_block") == num_made
        )
        assert done.stdout.endswith("1 passed, 0 failed\n")
    assert (tmp_path / "quantization_smollm.json").exists()
