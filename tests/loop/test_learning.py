"""Every algorithm learns the toy task, and does so along the curve on file.

All run for real: Megatron, and one SGLang for the whole module.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loop.golden_curves import Curve, algorithms, read_golden, record

FLIPPED = "tests.loop.flipped"
LEARNED = 0.15
"""Reward at the end. At the start it is 1/64; by chance it stays there."""
NUM_LAST = 3
CLOSE = (1e-3, 1e-2, 5e-2)
"""Relative, of the first steps: nothing but the rounding of another machine."""
LATER = 0.3
"""Absolute, of the mean reward of the last steps: one token sampled otherwise, and the rest differs."""


@pytest.fixture(scope="module")
def curves(made_once: Callable[..., Path]) -> dict[str, Curve]:
    def run(folder: Path) -> None:
        (folder / "curves.json").write_text(json.dumps(record([*algorithms(), FLIPPED], folder)))

    return json.loads((made_once("learning", run) / "curves.json").read_text())


def last_reward(curve: Curve) -> float:
    return statistics.fmean(row["reward/mean"] for row in curve[-NUM_LAST:])


def learned(curve: Curve) -> bool:
    return last_reward(curve) > LEARNED > 4 * curve[0]["reward/mean"]


def misfits(curve: Curve, golden: Curve) -> list[str]:
    """Where the curve leaves the one on file, in words."""
    assert len(curve) == len(golden)
    found = [
        f"step {step} {key}: {ours[key]}, on file {theirs[key]}"
        for step, (ours, theirs, near) in enumerate(zip(curve, golden, CLOSE, strict=False))
        for key in theirs
        if ours[key] != pytest.approx(theirs[key], rel=near, abs=near * 1e-2)
    ]
    ours, theirs = last_reward(curve), last_reward(golden)
    if abs(ours - theirs) > LATER:
        found.append(f"reward at the end: {ours}, on file {theirs}")
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", algorithms())
def test_the_reward_rises_along_the_curve_on_file(name: str, curves: dict[str, Curve]) -> None:
    curve = curves[name]
    assert learned(curve), [row["reward/mean"] for row in curve]
    assert misfits(curve, read_golden(name)) == []


@pytest.mark.timeout(400)
def test_a_loss_with_the_wrong_sign_is_seen(curves: dict[str, Curve]) -> None:
    curve = curves[FLIPPED]
    assert not learned(curve)
    assert misfits(curve, read_golden("grpo"))
    assert curve[0]["reward/mean"] == read_golden("grpo")[0]["reward/mean"]  # all else is the same
