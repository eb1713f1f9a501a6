"""What shared prefixes save: the plan's formulas beside steps that were measured, and by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared_prefixes import BUDGET, SIZES
from mrl.config import load_recipe
from mrl.planner import cost, report
from mrl.planner.hardware import HARDWARE
from mrl.planner.memory import pass_rows
from mrl.planner.prefixes import prefix_gain, prefix_row, prefix_speed, samples_together
from mrl.planner.shape import ModelShape, read_shape
from mrl.planner.stages import stages
from mrl.planner.workload import Workload, recipe_workload
from mrl.shared_prefixes import expected_gain
from mrl.toy_model import write_toy_model
from parallel.dims import ParallelDims
from tests.loop.conftest import TOY_RECIPE

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "shared_prefixes.json").read_text())
ONE = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
NAMED = Workload(
    prompts=1, samples=8, prompt_len=2048, response_len=256, micro_batch_tokens=BUDGET,
    weight_bytes=4, native=True, recompute=True, share_prefixes=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """The model of the measured steps."""
    folder = tmp_path_factory.mktemp("model") / "model"
    write_toy_model(folder, **SIZES)
    return read_shape(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(
    "case", [c for c in MEASURED["cases"] if c["same_routes"]], ids=lambda case: case["name"]
)
def test_formulas_are_near_measured_steps(case: dict[str, Any], shape: ModelShape) -> None:
    """Rows to the rounding of the file, and the speed within 8%."""
    work = dataclasses.replace(
        NAMED, prompts=case["prompts"], samples=case["num_samples"],
        prompt_len=case["prompt_len"], response_len=case["response_len"],
    )  # fmt: skip
    gain = prefix_gain(shape, work)
    assert gain.pays == (case["fewer_rows"] > 1)
    if gain.pays:
        assert gain.rows == pytest.approx(case["fewer_rows"], abs=1e-3)
    speed = prefix_speed(shape, work)
    assert speed == pytest.approx(case["speed"]["cpu_s"], rel=0.08)
    assert prefix_speed(shape, dataclasses.replace(work, share_prefixes=False)) == 1


def test_rows_and_scores_by_hand(shape: ModelShape) -> None:
    gain = prefix_gain(shape, NAMED)
    assert samples_together(NAMED) == 8
    assert gain.rows == pytest.approx(expected_gain(2048, 256, 8))
    # The first sample as before, seven with 257 rows of their own in one block.
    scores = 2304**2 / 2 + 7 * 257 * (2047 + 257)
    assert gain.scores == pytest.approx(8 * 2304**2 / 2 / scores)
    half = dataclasses.replace(NAMED, micro_batch_tokens=3200)
    assert samples_together(half) == 4
    assert prefix_gain(shape, half).rows == pytest.approx(expected_gain(2048, 256, 4))
    tokens = dataclasses.replace(NAMED, samples=32)  # 4 tokens a row at most
    assert samples_together(tokens) == 4 * BUDGET // 2304


def test_copies_for_attention_by_hand(shape: ModelShape) -> None:
    (stage,) = stages(shape, ONE)
    keys, width = 2047 + 257, 2 * 8 * 32
    one = 7 * (4 * keys * width + 3 * 257 * keys)
    assert prefix_row(shape, stage, ONE, NAMED, training=True).num_bytes == one
    kept = dataclasses.replace(NAMED, recompute=False)
    assert prefix_row(shape, stage, ONE, kept, training=True).num_bytes == 4 * one
    assert prefix_row(shape, stage, ONE, kept, training=False).num_bytes == one
    off = dataclasses.replace(NAMED, share_prefixes=False)
    assert prefix_row(shape, stage, ONE, off, training=True).num_bytes == 0
    rows = pass_rows(shape, stage, ONE, NAMED, training=True)
    assert "attention to shared prefixes" in {row.name for row in rows}


def test_the_plan_says_what_is_saved(shape: ModelShape) -> None:
    gpu = HARDWARE["h100"]
    (table,) = [t for t in report.tables(shape, ONE, NAMED, gpu) if "prefixes" in t.title]
    assert "4.49 times fewer" in " ".join(" ".join(row) for row in table.rows)
    off = dataclasses.replace(NAMED, share_prefixes=False)
    assert not any("prefixes" in t.title for t in report.tables(shape, ONE, off, gpu))
    seconds, before = (cost.step_cost(shape, ONE, w, gpu).seconds for w in (NAMED, off))
    ratio = before["train compute"] / seconds["train compute"]
    assert ratio == pytest.approx(prefix_speed(shape, NAMED))
    assert seconds["decode"] == before["decode"]


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        (["train.share_prefixes=auto", "model.transformer_impl=local"], True),
        (["train.share_prefixes=auto", "model.transformer_impl=auto"], False),
        (["model.transformer_impl=local"], False),
    ],
)
def test_only_mrls_own_layers_share(overrides: list[str], shares: bool, shape: ModelShape) -> None:
    work = recipe_workload(load_recipe(TOY_RECIPE, overrides), shape, 64)
    assert work.share_prefixes == shares
