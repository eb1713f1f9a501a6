"""The algorithms learn the toy task, along the curve on file; what a step keeps survives a restart.

All of it for real: Megatron, and one SGLang for the whole module.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.run.compare import MACHINE
from tests.docs.metric_keys import undocumented
from tests.loop.golden_curves import Curve, algorithms, curve_of, read_golden
from tests.loop.resumed import whole_and_resumed
from tests.loop.shared_engine import SharedEngine
from tests.ranks import run_ranks

FLIPPED = "tests.loop.flipped"
LEARNED = 0.1
"""Reward at the end, five times that of the start; by chance it stays there."""
NUM_LAST = 3
CLOSE = (1e-3, 1e-2)
"""Relative, of the first steps: nothing but the rounding of another machine."""
LATER = 0.3
"""Absolute, of the mean reward of the last steps: one token sampled otherwise, and the rest differs."""


IN_FULL = ("gspo",)
"""Whose whole curve `make test` runs, and `make test-all` that of every other."""
FIRST_STEPS = ("dapo", "a3po")
"""The others of which `make test` runs the first steps: each has a part in the loop. The rest differ
from them in formulas, which tests/algorithms checks, or have a critic, as the run of `resumed`."""
OTHERS = [name for name in algorithms() if name not in IN_FULL]


def everything(scratch: Path) -> dict[str, Any]:
    engine = SharedEngine(scratch)
    try:
        return {
            "curves": {
                **{name: curve_of(name, engine) for name in IN_FULL},
                **{name: curve_of(name, engine, len(CLOSE)) for name in FIRST_STEPS},
            },
            "resumed": whole_and_resumed(engine),
        }
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("learning")
    return run_ranks(1, everything, folder / "runs", folder=folder / "out")[0]


def last_reward(curve: Curve) -> float:
    return statistics.fmean(row["reward/mean"] for row in curve[-NUM_LAST:])


def learned(curve: Curve) -> bool:
    return last_reward(curve) > max(LEARNED, 4 * curve[0]["reward/mean"])


def misfits(curve: Curve, golden: Curve) -> list[str]:
    """Says where the curve leaves the one on file; compares its end only if the curve is whole."""
    assert len(curve) in (len(CLOSE), len(golden))
    found = [
        f"step {step} {key}: {ours[key]}, on file {theirs[key]}"
        for step, (ours, theirs, near) in enumerate(zip(curve, golden, CLOSE, strict=False))
        for key in theirs
        if theirs[key] is not None
        and ours[key] != pytest.approx(theirs[key], rel=near, abs=near * 1e-2)
    ]
    ours, theirs = last_reward(curve), last_reward(golden)
    if len(curve) == len(golden) and abs(ours - theirs) > LATER:
        found.append(f"reward at the end: {ours}, on file {theirs}")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", IN_FULL)
def test_the_reward_rises_along_the_curve_on_file(name: str, found: dict[str, Any]) -> None:
    curve = found["curves"][name]
    assert learned(curve), [row["reward/mean"] for row in curve]
    assert misfits(curve, read_golden(name)) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FIRST_STEPS)
def test_the_first_steps_are_those_on_file(name: str, found: dict[str, Any]) -> None:
    assert misfits(found["curves"][name], read_golden(name)) == []


@pytest.mark.parametrize("key", ["loss/policy", "grad_norm", "reward/mean"])
def test_a_curve_that_leaves_the_one_on_file_is_seen(key: str) -> None:
    """`make test-all` trains one whose loss has the wrong sign."""
    golden = read_golden("gspo")
    assert misfits(golden, golden) == []
    for step, near in enumerate(CLOSE):
        curve = [dict(row) for row in golden]
        curve[step][key] += 1.1 * near * max(abs(curve[step][key]), 1e-2)
        assert [line.split(":")[0] for line in misfits(curve, golden)] == [f"step {step} {key}"]
        assert misfits(curve[: len(CLOSE)], golden) == misfits(curve, golden)
    assert learned(golden)
    fallen, risen = (
        [*golden[:-NUM_LAST], *[row | {"reward/mean": end} for row in golden[-NUM_LAST:]]]
        for end in (0.0, last_reward(golden) + 1.01 * LATER)
    )
    assert not learned(fallen)
    assert misfits(risen, golden)[-1].startswith("reward at the end: ")


def whole_curves(scratch: Path) -> dict[str, Curve]:
    engine = SharedEngine(scratch)
    try:
        return {name: curve_of(name, engine) for name in [*OTHERS, FLIPPED]}
    finally:
        engine.stop()


@pytest.mark.release
@pytest.mark.timeout(900)
def test_every_other_algorithm_learns_along_its_curve(tmp_path: Path) -> None:
    (curves,) = run_ranks(1, whole_curves, tmp_path / "runs", folder=tmp_path / "out")
    flipped = curves.pop(FLIPPED)
    assert not learned(flipped)
    for curve in (flipped, flipped[: len(CLOSE)]):  # its first steps alone show it, too
        assert misfits(curve, read_golden("grpo"))
    assert flipped[0]["reward/mean"] == pytest.approx(
        read_golden("grpo")[0]["reward/mean"], rel=1e-3
    )  # all else is the same
    apart = {name: misfits(curve, read_golden(name)) for name, curve in curves.items()}
    assert apart == {name: [] for name in OTHERS}
    assert [name for name, curve in curves.items() if not learned(curve)] == []
    for name in ("ppo", "vapo"):
        assert_critic_learns(curves[name])


def assert_critic_learns(rows: Curve) -> None:
    assert all(row["value/grad_norm"] > 0 for row in rows)
    explained = [row["value/explained_variance"] for row in rows]
    assert abs(explained[0]) < 1e-6  # all values are 0 at first
    assert max(explained[len(rows) // 2 :]) > 0.05
    assert rows[-1]["memory/train/critic_parameters_device_bytes"] > 0


@pytest.mark.timeout(600)
def test_the_warm_up_of_a_critic_leaves_the_policy_alone(found: dict[str, Any]) -> None:
    curve = found["resumed"]["rows"]
    assert curve[0]["grad_norm"] == 0.0
    assert curve[0]["loss/policy"] != curve[0]["loss/policy"]  # NaN: it had none
    assert all(row["grad_norm"] > 0 for row in curve[1:])
    assert all(row["value/grad_norm"] > 0 for row in curve)


@pytest.mark.timeout(600)
def test_no_pass_before_the_update_where_nobody_reads_it(found: dict[str, Any]) -> None:
    skipped, ran = (found["curves"][name][0] for name in ("a3po", "gspo"))
    assert all("time/logprob_s" in row for row in found["curves"]["gspo"])  # two updates a rollout
    assert "time/logprob_s" not in skipped
    assert "time/logprob_s" in ran
    for row in (skipped, ran):  # measured in the first update's own pass
        assert 0 < row["mismatch/logprob_abs_max"] < 1e-4
        assert row["routing/replay_coverage"] == 1.0
        assert row["entropy"] > 1.0


@pytest.mark.timeout(600)
def test_a_resumed_run_goes_on_to_the_same_bits(found: dict[str, Any]) -> None:
    run = found["resumed"]
    rows, again = run["rows"][2:], run["again"]
    for ours, theirs in zip(again, rows, strict=True):
        apart = {k for k in theirs if repr(ours[k]) != repr(theirs[k])}  # NaN is NaN
        assert {k for k in apart if not k.startswith(MACHINE)} == set()
    resumed, whole = run["ends"][1], run["ends"][0]
    assert resumed.keys() == whole.keys()
    assert {key.split(".")[0] for key in whole} >= {"model", "critic_model", "critic_exp_avg"}
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    assert run["prompts"][0] == run["prompts"][1]


@pytest.mark.timeout(600)
def test_what_a_step_keeps_has_moved(found: dict[str, Any]) -> None:
    """Else the test of the resumed run would prove nothing."""
    rows = found["resumed"]["rows"]
    coefficients = [row["kl/coef"] for row in rows]
    assert coefficients[0] == coefficients[1] == 0.05  # a policy that was not trained says nothing
    assert len(set(coefficients[1:])) == len(coefficients) - 1
    drawn = sum(row["dynamic_sampling/prompts_drawn"] for row in rows)
    assert drawn > 3 * 8
    assert found["resumed"]["prompts"][0] == drawn
    assert rows[0]["grad_norm"] == 0.0 < rows[1]["grad_norm"]


@pytest.mark.timeout(600)
def test_dynamic_sampling_trains_on_groups_with_a_signal(found: dict[str, Any]) -> None:
    rows = found["curves"]["dapo"]
    assert any(row["dynamic_sampling/rounds"] > 1 for row in rows)
    for row in rows:
        drawn = row["dynamic_sampling/prompts_drawn"]
        assert (
            row["dynamic_sampling/zero_signal_groups"]
            == drawn - 8 + (row["dynamic_sampling/missing_groups"])
        )
        assert row["reward/zero_signal_groups"] == row["dynamic_sampling/missing_groups"]


def test_the_metrics_of_the_algorithms_are_documented(found: dict[str, Any]) -> None:
    """docs/metrics.md has them; tests/docs/test_metrics_page.py compares it with the source."""
    rows = [row for curve in found["curves"].values() for row in curve] + found["resumed"]["rows"]
    assert undocumented({key for row in rows for key in row}) == []
