"""`make collapse`: the disturbance in a real engine, the criteria on made-up curves, the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import RESULTS, between_markers
from mrl.config import load_recipe
from mrl.toy_model import write_toy_model
from studies.collapse import DOCUMENT, PLOT, checks
from studies.collapse_study import start
from studies.collapse_study.arms import ARMS, COLORS, MODELS, Case, cases
from studies.collapse_study.calibrate import find_scale, repeated
from studies.collapse_study.criteria import (
    SIGNS,
    WINDOW,
    claim,
    collapse_of,
    differ,
    is_lower,
    verdicts,
)
from studies.collapse_study.noise import NoiseFile, disturbed
from studies.collapse_study.report import NOT_RUN, line_of, panels, rows_of, table, verdict_table
from studies.stability_study.plot import svg
from tests.ranks import run_ranks

TOY = MODELS["toy"]
GOOD = [0.3 + 0.01 * i for i in range(20)]
SCALE = 0.1
"""Of the noise in a test with a real engine: about one choice in ten differs."""
FALLS = [0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6, 0.4, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2]


def test_the_noise_is_a_function_of_the_row() -> None:
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    once = disturbed(x, 3, 0.5, 7)
    assert torch.equal(once, disturbed(x.clone(), 3, 0.5, 7))
    assert torch.equal(once[17:18], disturbed(x[17:18], 3, 0.5, 7))  # in any batch
    assert disturbed(x, 3, 0.0, 7) is x
    size = x.square().mean(1, keepdim=True).sqrt()
    noise = (once - x) / size
    assert noise.mean().abs() < 0.02
    assert noise.std() == pytest.approx(0.5, rel=0.02)
    for other in (disturbed(x, 4, 0.5, 7), disturbed(x, 3, 0.5, 8)):
        assert (noise * (other - x) / size).mean().abs() < 0.02  # another layer, another seed
    half = disturbed(x.bfloat16(), 3, 0.5, 7)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half[5], disturbed(x.bfloat16()[5:6], 3, 0.5, 7)[0])


def test_a_scale_is_checked_and_shared(tmp_path: Path) -> None:
    noise = NoiseFile.create(tmp_path / "noise")
    there = NoiseFile(tmp_path / "noise", "r")
    assert there.read() == (0.0, 0)
    noise.set(0.25, 3)
    assert there.read() == (0.25, 3)
    with pytest.raises(ValueError, match="got scale nan, expected a finite number from 0 up"):
        noise.set(float("nan"), 0)


@pytest.mark.parametrize("wanted", [0.01, 0.03, 0.1])
def test_the_scale_of_a_rate_is_found(wanted: float) -> None:
    tried: list[tuple[float, float]] = []

    def measure(scale: float) -> float:
        tried.append((scale, 0.3 * scale / (1 + scale)))
        return tried[-1][1]

    scale = find_scale(measure, wanted)
    assert measure(scale) == pytest.approx(wanted, rel=0.05)
    assert len(tried) < 8
    assert find_scale(measure, wanted, tried) == scale  # known already
    with pytest.raises(RuntimeError, match=r"no scale gives a rate of 0\.5 to 5% after 16 tries"):
        find_scale(measure, 0.5)


def disturbed_engine(folder: Path) -> dict[str, Any]:
    """What a real engine does with three scales of noise, beside a trainer in float32."""
    from parallel import prepare
    from studies.collapse_study.worker import disturb
    from studies.stability_study.runs import make_run, start_engine

    prepare()
    noise = disturb(folder / "noise")
    small = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "sft=null",
             "rollout.max_response_len=16", "rollout.return_routing_weights=true",
             "moe.replay=ids_weights", "train.num_steps_per_rollout=1")  # fmt: skip
    job = Case("R3", 0.1, 0).job(replace(TOY, keys=small), folder, 1, 0.0)
    write_toy_model(folder / "start", num_layers=3, num_experts=16, num_experts_per_tok=4)
    engine, mesh = start_engine(job)
    try:
        run = make_run(job, mesh)
        run.begin(engine)
        rollout = repeated(run)

        def roll(scale: float, seed: int = 0) -> tuple[list[Any], dict[str, dict[str, float]]]:
            noise.set(scale, seed)
            groups = rollout()
            samples = [sample for group in groups for sample in group.samples]
            rolled = [(s.token_ids, s.rollout_logprobs, s.routing.expert_ids) for s in samples
                      if s.routing is not None]  # fmt: skip
            return rolled, run.both_ways(groups)

        first, paired = roll(SCALE)
        again, _ = roll(SCALE)
        other, _ = roll(SCALE, seed=1)
        calm, calm_paired = roll(0.0)
    finally:
        engine.stop()

    def same(a: list[Any], b: list[Any]) -> bool:
        return all(torch.equal(x, y) for m, n in zip(a, b, strict=True)
                   for x, y in zip(m, n, strict=True))  # fmt: skip

    return {
        "num": len(first),
        "again": same(first, again),
        "other": same(first, other),
        "calm": same(first, calm),
        "paired": paired,
        "calm_paired": calm_paired,
    }


@pytest.mark.timeout(300)
def test_an_engine_is_disturbed_in_its_routers_alone(tmp_path: Path) -> None:
    """Where the trainer replays the engine's choices and their weights, no difference remains, so the
    experts got what they get without noise."""
    (found,) = run_ranks(1, disturbed_engine, tmp_path, folder=tmp_path / "out")
    assert found["num"] == 16
    assert found["paired"]["routes"]["disagreement"] == pytest.approx(0.1, rel=0.5)
    assert found["again"]
    assert not found["other"]
    assert not found["calm"]
    assert found["calm_paired"]["routes"]["disagreement"] < 1e-3
    assert found["calm_paired"]["native"]["abs_max"] < 1e-3
    assert found["paired"]["native"]["abs_mean"] > 1e-2
    assert found["paired"]["replayed"]["abs_max"] < 1e-4


def made_up(
    rewards: list[float], arm: str = "GRPO", rate: float = 0.1, seed: int = 0, **more: Any
) -> dict[str, Any]:
    paired = {
        "native": {"k3": 0.02, "num_extreme": 0, "num_tokens": 9},
        "replayed": {"k3": 0.01, "num_extreme": 0, "num_tokens": 9},
        "routes": {"disagreement": rate, "token_any_layer": 1.0},
    }
    usual = {"mismatch/k3": 0.02, "grad_norm": 1.0, "entropy": 0.5, "time/step_s": 9.0}
    steps = [{"reward/mean": r, **usual, "paired": paired} for r in rewards]
    for step, k3 in zip(steps, more.pop("k3", []), strict=False):
        step["mismatch/k3"] = k3
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "ended": "done",
        "seconds": 9.0,
        "steps": steps,
        "start": "0123456789abcdef",
    } | more


def test_what_a_collapse_is() -> None:
    assert collapse_of(made_up(GOOD)) is None
    assert collapse_of(made_up(FALLS)) == "below half of its best"
    assert collapse_of(made_up([*FALLS, *[0.5] * WINDOW])) is None  # it came back
    assert collapse_of(made_up([0.5] * WINDOW + [0.44] * WINDOW)) == "below its start"
    assert collapse_of(made_up([0.5] * WINDOW + [0.46] * WINDOW)) is None
    assert collapse_of(made_up([0.5], ended="not finite: a gradient")) == "not finite"
    with pytest.raises(ValueError, match="got 2 steps, expected at least 5"):
        collapse_of(made_up([0.5, 0.5]))


def test_what_a_sign_of_trouble_is() -> None:
    calm = made_up(GOOD)
    assert not any(sign(calm) for sign in SIGNS.values())
    assert SIGNS["k3"](made_up(GOOD, k3=[0.02] * 10 + [0.2] * 10))
    assert not SIGNS["k3"](made_up(GOOD, k3=[0.02] * 10 + [0.1] * 10))
    assert not SIGNS["k3"](made_up(GOOD, k3=[0.02] * 19 + [0.5]))  # one step is no window
    for key, sign, value in (("grad_norm", "gradient", 10.0), ("entropy", "entropy", 1.1)):
        run = made_up(GOOD)
        for step in run["steps"][-WINDOW:]:
            step[key] = value
        assert SIGNS[sign](run)


def study(collapses: dict[tuple[str, float], int]) -> list[dict[str, Any]]:
    """All runs of the toy; of an arm at a rate so many collapse."""
    return [
        made_up(
            FALLS if case.seed < collapses.get((case.arm, case.rate), 0) else GOOD,
            case.arm, case.rate, case.seed,
        )
        for case in cases(TOY, 5)
    ]  # fmt: skip


def judged(collapses: dict[tuple[str, float], int]) -> dict[str, str]:
    return verdicts(study(collapses), TOY.arms, TOY.rates, 5)


MAIN = "at 10% GRPO collapses, and without a disturbance it does not"


def test_what_decides_the_claim() -> None:
    assert [differ(4, n) for n in range(5)] == [
        "supported", "undecided", "undecided", "refuted", "refuted",
    ]  # fmt: skip
    found = judged({("GRPO", 0.1): 5, ("GRPO+TIS", 0.1): 4, ("GSPO", 0.1): 2, ("R3", 0.1): 1})
    assert found[MAIN] == "supported"
    assert found["at 10% R3 prevents it"] == "supported"
    assert found["at 10% GRPO+TIS prevents it"] == "refuted"
    assert found["at 10% GSPO prevents it"] == "undecided"
    assert found["at 1% R3 prevents it"] == "nothing to prevent"
    assert found["at 1% GRPO collapses, and without a disturbance it does not"] == "refuted"
    assert claim(found, 0.1) == "undecided"
    assert claim(judged({("GRPO", 0.1): 4}), 0.1) == "supported"
    assert claim(judged({}), 0.1) == "refuted"
    both = {("GRPO", 0.1): 5, ("GRPO", 0.0): 5}
    assert judged(both)[MAIN] == "refuted"  # something else than the mismatch makes it collapse
    assert verdicts(study({}), ["R3"], [0.1], 5)["at 10% R3 prevents it"] == "nothing to prevent"
    some = verdicts(study({})[:30], TOY.arms, TOY.rates, 5)
    assert set(some.values()) == {"incomplete"}
    assert claim(some, 0.1) == "incomplete"
    largest = verdicts(study({})[:40], TOY.arms, TOY.rates, 5)
    assert claim(largest, 0.1) == "refuted"  # the other rates do not decide it
    assert largest["at 1% GRPO collapses, and without a disturbance it does not"] == "incomplete"


def test_a_run_that_only_learns_less_is_seen() -> None:
    low, high = ([made_up([r * x for r in GOOD], seed=i) for i, x in enumerate(part)]
                 for part in ((0.7, 0.8), (0.9, 1.0)))  # fmt: skip
    assert is_lower(low, high)
    assert not is_lower(high, low)
    assert not is_lower(low, [*high, made_up([0.75 * r for r in GOOD])])
    assert not is_lower([], high)


def test_rows_and_tables() -> None:
    results = study({("GRPO", 0.1): 5})
    results[-1] = made_up([0.3], "R3+GSPO", 0.01, 4, ended="not finite: a gradient")
    rows = rows_of(results, TOY)
    assert len(rows) == 1 + len(ARMS) * 3
    lines = table(rows).splitlines()
    assert len({line.count(" | ") for line in [lines[0], *lines[2:]]}) == 1
    row = next(line for line in lines if line.startswith("| GRPO | 10%"))
    assert "| 5 of 5 | yes |" in row
    assert "| 1 of 5 | no |" in lines[9]
    parts = verdicts(results, TOY.arms, TOY.rates, 5)
    assert verdict_table(parts, claim(parts, 0.1)).endswith("**supported** |")
    assert table([]) == NOT_RUN
    assert verdict_table(verdicts([], TOY.arms, TOY.rates, 5), "incomplete") == NOT_RUN
    drawn = svg(results, COLORS, panels(TOY))
    assert drawn.count("<polyline") == len(ARMS) * 5
    assert "nan" not in drawn
    assert line_of(results[1]).startswith(
        "GRPO     10% seed 0: reward 0.48 to 0.20 (best 0.58), 10.0%"
    )
    assert "not finite" in line_of(results[-1])


def test_what_must_hold_of_the_study() -> None:
    wanted, results = cases(TOY, 5), study({("GRPO", 0.1): 5})
    assert all(checks(results, wanted).values())
    far = made_up(GOOD, rate=0.1, start="fedcba9876543210")
    far["steps"][0]["paired"]["routes"]["disagreement"] = 0.2
    far["steps"][0]["paired"]["replayed"]["k3"] = 1.0
    assert not any(checks([*results, far], wanted).values())


def test_arms_and_jobs_are_the_pages(tmp_path: Path) -> None:
    assert len(cases(TOY, 5)) == 5 * (1 + 7 * 3)
    assert len(cases(MODELS["smollm"], 2)) == 6
    assert cases(TOY, 5)[:2] == [Case("GRPO", 0.0, 0), Case("GRPO", 0.1, 0)]
    assert {case.rate for case in cases(TOY, 5)[:40]} == {0.0, 0.1}
    page = DOCUMENT.read_text()
    for arm, keys in ARMS.items():
        assert f"| {arm} |" in page
        job = Case(arm, 0.03, 2).job(TOY, tmp_path, 40, 0.5)
        assert (job.columns, job.router_noise) == ({"rate": 0.03}, 0.5)
        recipe = load_recipe(TOY.recipe, [*job.more, "output_dir=x"])
        assert recipe.rollout.dtype in (None, "auto", "float32")
        assert recipe.model.dtype == "float32"
        assert all(key in job.more for key in keys)
    for model in MODELS.values():
        load_recipe(model.recipe, [*model.keys, *ARMS["R3"], "output_dir=x"])


def test_one_demonstration_in_three_is_right() -> None:
    rows = start.demonstrations()
    assert rows == start.demonstrations()
    assert rows[0]["messages"][-1]["role"] == "assistant"
    answers = {row["prompt"][-1]["content"]: row["answer"] for row in start.sums.rows()}
    right = [
        row["messages"][-1]["content"].split(" = ")[1] == answers[row["messages"][-2]["content"]]
        for row in rows
    ]
    assert sum(right) == -(-len(rows) // start.RIGHT)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_the_page_shows_the_result_on_file(model: Any) -> None:
    page, file = DOCUMENT.read_text(), RESULTS / f"{model.result}.json"
    if not file.exists():
        assert between_markers(page, model.name, NOT_RUN) == page
        return
    result = json.loads(file.read_text())
    assert between_markers(page, model.name, table(result["rows"])) == page
    if model.has_control:
        text = verdict_table(result["claim"], result["whole_claim"])
        assert between_markers(page, "claim", text) == page
        assert f"]({PLOT.name})" in page


@pytest.mark.release
@pytest.mark.timeout(3000)
def test_the_study_in_short(tmp_path: Path) -> None:
    """The control and two arms, for as many steps as a verdict needs; the second call makes no run."""
    arms = ("GRPO+RS", "R3")
    keys = ("--seeds", "1", "--steps", str(WINDOW), "--rates", "0.1", "--folder", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-m", "studies.collapse", "--arms", *arms, *keys]
    for num_made in (1 + len(arms), 0):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("4 passed, 0 failed\n")
        assert sum(line.startswith("[") for line in done.stdout.splitlines()) == num_made
    rows = json.loads((tmp_path / "collapse.json").read_text())["rows"]
    assert [(row["arm"], row["rate"]) for row in rows] == [
        ("GRPO", 0.0),
        ("GRPO+RS", 0.1),
        ("R3", 0.1),
    ]
    assert rows[0]["seen"][0] < 1e-3 < rows[1]["seen"][0]
