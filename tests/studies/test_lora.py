"""`make lora`: the arms, checks of made-up runs, the page, and the comparison in short with engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import RESULTS, between_markers
from mrl.config import load_recipe
from studies import lora
from studies.lora_study.arms import ARMS, LARGE, NUM_STEPS, RATES, RECIPE, SEED, SWEEP_SEED, Run
from studies.lora_study.plot import svg
from studies.lora_study.report import NOT_RUN, checks, chosen_rates, page_part
from studies.lora_study.runs import tensor_bytes
from studies.lora_study.start import demonstrations


def made_up(model: str, arm: str, rate: float, seed: int, **more: Any) -> dict[str, Any]:
    """A run that learns by and by; the adapter is half as large as the model."""
    size = 100 if arm == "full" else 50
    return {
        "model": model, "arm": arm, "rate": rate, "seed": seed,
        "rewards": [0.1 + 0.9 * i / (NUM_STEPS - 1) for i in range(NUM_STEPS)],
        "gaps": [1e-6] * NUM_STEPS, "coverages": [1.0] * NUM_STEPS,
        "sync_bytes": [size] * NUM_STEPS, "exported_bytes": size,
        "sync_s": [9.0] + [0.5 * size] * (NUM_STEPS - 1), "verify_s": [0.1 * size] * NUM_STEPS,
        "num_samples": 128 * NUM_STEPS, "prompts": "abc", "wall_s": 1.0,
    } | more  # fmt: skip


def whole() -> list[dict[str, Any]]:
    tried = [made_up("base", arm, rate, SWEEP_SEED) for rate in RATES for arm in ARMS]
    return tried + [made_up(model, arm, 3e-3, SEED) for model in ("base", LARGE) for arm in ARMS]


def test_the_arms_differ_in_the_adapter_alone(tmp_path: Path) -> None:
    full, adapted = (
        load_recipe(RECIPE, Run("base", arm, 3e-3, 1, 70).keys(tmp_path, tmp_path / "out"))
        for arm in ARMS
    )
    assert full.lora is None
    assert adapted.lora is not None
    assert adapted.lora.experts == "per_expert"
    assert adapted.moe.routing_replay == "r3"
    assert adapted.model_copy(update={"lora": None}) == full


def test_the_base_has_seen_no_letter_more_than_others() -> None:
    rows = demonstrations(4096)
    places = [row["prompt"].index(row["completion"][0]) for row in rows]
    assert all(set(row["completion"]) == {row["completion"][0]} for row in rows)
    assert all(len(row["completion"]) == 32 for row in rows)
    first = places.count(0) / len(places)
    assert 1 / 16 < first < 0.13  # a letter that stands there twice counts as its first place


def test_a_rate_is_chosen_by_the_second_half_of_the_runs_that_tried_it() -> None:
    early = [0.9] * (NUM_STEPS // 2) + [0.5] * (NUM_STEPS // 2)
    late = [0.0] * (NUM_STEPS // 2) + [0.6] * (NUM_STEPS // 2)
    results = [
        made_up("base", "full", 1e-3, SWEEP_SEED, rewards=early),
        made_up("base", "full", 3e-3, SWEEP_SEED, rewards=late),
        made_up("base", "lora", 1e-3, SWEEP_SEED, rewards=late),
        made_up("base", "lora", 3e-3, SWEEP_SEED, rewards=early),
        made_up("base", "full", 1e-2, SEED),
        made_up(LARGE, "full", 1e-2, SWEEP_SEED),
    ]
    assert chosen_rates(results) == {"full": 3e-3, "lora": 1e-3}


GOOD = [0.1 + 0.9 * i / (NUM_STEPS - 1) for i in range(NUM_STEPS)]


@pytest.mark.parametrize(
    ("model", "arm", "more", "says"),
    [
        ("base", "lora", {"gaps": [1e-6] * 69 + [2e-4]}, "differ by at most 0.0001"),
        ("base", "lora", {"coverages": [1.0] * 69 + [0.999]}, "coverage of the replay"),
        ("base", "lora", {"prompts": "other"}, "the same 8960 samples"),
        ("base", "lora", {"sync_bytes": [50] * 69 + [51]}, "bytes of its adapter (50)"),
        ("base", "full", {"exported_bytes": 99}, "bytes of its model (99)"),
        (LARGE, "lora", {"exported_bytes": 99}, "larger model sends the bytes of its adapter (99)"),
        ("base", "full", {"rewards": [0.5, *GOOD[1:]]}, "the base has a reward below 0.3 (0.500)"),
        ("base", "full", {"rewards": [0.85 * x for x in GOOD]}, "all weights reaches 0.9"),
        ("base", "lora", {"rewards": [0.94 * x for x in GOOD]}, "reaches 0.95 of the reward"),
    ],
)
def test_what_must_hold(model: str, arm: str, more: dict[str, Any], says: str) -> None:
    assert all(checks(whole(), NUM_STEPS).values())
    results = [
        one | more if (one["model"], one["arm"], one["seed"]) == (model, arm, SEED) else one
        for one in whole()
    ]
    (failed,) = [text for text, holds in checks(results, NUM_STEPS).items() if not holds]
    assert says in failed
    assert ("reward" in failed or "0.9 " in failed) == (failed not in checks(results, 2))


def test_the_page_has_a_row_for_each_run_of_the_toy_model() -> None:
    text = page_part({"runs": whole()})
    assert text.count("tried, and chosen") == len(ARMS)
    assert text.count("| LoRA | 0.003 | 1: compared | 0.100 |") == 1
    toy = next(line for line in text.splitlines() if line.startswith("| toy"))
    assert toy == "| toy | 50 | 100 | 0.50 | 0.50 | 0.50 | 0.50 |"
    assert svg(whole()).count("<polyline") == len(ARMS) * (len(RATES) + 1)
    assert svg(whole()).count('stroke-width="2"') == len(ARMS)


def test_bytes_of_tensors_are_counted_without_the_header(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert tensor_bytes(tmp_path / "a.safetensors") == 3 * 5 * 4 + 7 * 2


def test_the_page_shows_the_result_on_file() -> None:
    file = RESULTS / "lora.json"
    result = json.loads(file.read_text()) if file.exists() else None
    page = lora.PAGE.read_text()
    assert between_markers(page, lora.MARKER, page_part(result)) == page
    if result is None:
        assert NOT_RUN in page
    else:
        assert lora.PLOT.read_text() == svg(result["runs"])
        assert f"]({lora.PLOT.name})" in page


def test_a_study_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch) -> None:
    trained: list[str] = []

    def train(runs: Any, start: Path, folder: Path) -> list[dict[str, Any]]:
        if len(trained) == 3:
            raise lora.Unexpected("it ended with code 1")
        trained.append(runs[0].name)
        return [made_up(run.model, run.arm, run.rate, run.seed) for run in runs]

    monkeypatch.setattr(lora, "train", train)
    monkeypatch.setattr(lora, "ensure_start", lambda work: work)
    with pytest.raises(lora.Unexpected):
        lora.make_all(tmp_path, 70)
    before = trained.copy()
    trained[:] = []
    results = lora.make_all(tmp_path, 70)
    assert before == ["base_full_1e-03_0", "base_full_3e-03_0", "base_full_1e-02_0"]
    assert trained == ["base_full_1e-03_1", "large_full_1e-04_1"]
    assert len(results) == len(ARMS) * (len(RATES) + 2)


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_the_comparison_in_short(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "studies.lora", "--steps", "2", "--work", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "7 passed, 0 failed"
    result = json.loads((tmp_path / "lora.json").read_text())
    runs = result["runs"]
    assert [len(run["rewards"]) for run in runs] == [2] * len(ARMS) * (len(RATES) + 2)
    assert max(run["rewards"][0] for run in runs) < 0.3
    assert NOT_RUN not in lora.pages("lora", result)[lora.PAGE]
