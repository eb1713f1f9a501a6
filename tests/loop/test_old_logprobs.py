"""The only optimizer step of a rollout takes its old log-probs from its own forward pass. Nothing but
the time changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mrl.learn.updates import Updates
from tests.loop.conftest import Toy
from tests.loop.test_guards import made_trainer
from tests.ranks import run_ranks
from tests.release import release

STEPS = 2
COMPARED = ("guard/ratio_error", "guard/clip_budget")
"""Metrics that compare two passes; without the first pass there is nothing to compare."""
SAME = {
    "EP2": ("parallel.expert_model_parallel_size=2",),
    "PP2": ("parallel.pipeline_model_parallel_size=2", "train.recompute=true"),
}


def trained(overrides: list[str], always_passes: bool) -> dict[str, Any]:
    """Train on saved rollouts -> the metrics of each step, and the weights."""
    with pytest.MonkeyPatch.context() as patch:
        if always_passes:
            patch.setattr(Updates, "pass_is_old", False)
        trainer = made_trainer(overrides)
        rows = [trainer.run_step() for _ in range(STEPS)]
    weights = [p.detach().clone() for c in trainer.policy.chunks for p in c.parameters()]
    return {"rows": rows, "weights": weights}


def without_times(row: dict[str, float]) -> dict[str, float]:
    timed = ("time/", "throughput/", "memory/", *COMPARED)
    return {key: value for key, value in row.items() if not key.startswith(timed)}


def require_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for one, other in zip(first["rows"], second["rows"], strict=True):
        a, b = without_times(one), without_times(other)
        assert a.keys() == b.keys()
        assert {k: (a[k], b[k]) for k in a if a[k] != b[k] and a[k] == a[k]} == {}
    pairs: list[tuple[Tensor, Tensor]] = list(zip(first["weights"], second["weights"], strict=True))
    assert all(a.equal(b) for a, b in pairs)


def run_both(toy: Toy, recorded: Path, folder: Path, world: int, *more: str) -> list[Any]:
    """Return (without the pass, with it) of each rank."""
    found = []
    for passes in (False, True):
        overrides = settings(toy, recorded, folder / f"run_{passes}", *more)
        found.append(run_ranks(world, trained, overrides, passes, folder=folder / f"out_{passes}"))
    return list(zip(*found, strict=True))


def settings(toy: Toy, recorded: Path, folder: Path, *more: str) -> list[str]:
    saved = f"debug.load_rollouts={recorded / 'rollouts'}"
    return toy.overrides(folder, saved, f"train.num_steps={STEPS}", *more)


@pytest.mark.parametrize(
    "more",
    [
        ("algorithm.name=gspo", "algorithm.importance=tis"),
        release(("algorithm.name=grpo", "moe.routing_replay=off")),
    ],
    ids=lambda more: more[0],
)
def test_the_pass_is_left_out_and_the_bits_stay(
    toy: Toy, recorded: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    ((skips, passes),) = run_both(toy, recorded, tmp_path, 1, *more)
    require_same(skips, passes)
    assert ["time/logprob_s" in row for row in passes["rows"]] == [True] * STEPS
    # The first update after a start is preceded by a pass, with which its guard compares it.
    assert ["time/logprob_s" in row for row in skips["rows"]] == [True, False]
    for number, row in enumerate(skips["rows"]):
        assert row.get("guard/ratio_error", 0.0) < 1e-5
        assert ("guard/ratio_error" in row) == (number == 0)
        assert "guard/clip_budget" not in row or number == 0
        assert row["mismatch/k3"] > 0
    budgets = [row.get("guard/clip_budget_rollout") for row in skips["rows"]]
    assert budgets == [row.get("guard/clip_budget_rollout") for row in passes["rows"]]
    assert (budgets[0] is not None) == ("algorithm.name=gspo" in more)
    for step in range(STEPS):
        records = [
            (tmp_path / f"run_{passes}" / "tokens" / f"step_{step:06d}.safetensors").read_bytes()
            for passes in (False, True)
        ]
        assert records[0] == records[1]


@pytest.mark.release
@pytest.mark.parametrize("more", SAME.values(), ids=list(SAME))
def test_so_they_do_on_two_ranks(
    toy: Toy, recorded: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    for skips, passes in run_both(toy, recorded, tmp_path, 2, *more):
        require_same(skips, passes)
        assert "time/logprob_s" not in skips["rows"][1]


@pytest.mark.parametrize(
    "more",
    [
        release("train.num_steps_per_rollout=2"),  # test_learning.py looks at its GSPO curve
        release("train.num_epochs_per_rollout=2"),
        "guards.min_ess=0.01",
    ],
)
def test_who_needs_the_pass_keeps_it(toy: Toy, recorded: Path, tmp_path: Path, more: str) -> None:
    overrides = settings(toy, recorded, tmp_path / "run", more)
    (found,) = run_ranks(1, trained, overrides, False, folder=tmp_path / "out")
    assert all("time/logprob_s" in row for row in found["rows"])


def skipped_step(overrides: list[str]) -> dict[str, float]:
    """Return the metrics of a step whose gradients are not finite, without a pass before the update."""
    trainer = made_trainer(overrides)
    trainer.run_step()
    next(trainer.policy.chunks[0].parameters()).register_hook(lambda grad: grad * float("nan"))
    return trainer.run_step()


def test_a_skipped_step_has_the_metrics_of_its_pass(
    toy: Toy, recorded: Path, tmp_path: Path
) -> None:
    (row,) = run_ranks(
        1, skipped_step, settings(toy, recorded, tmp_path / "run"), folder=tmp_path / "out"
    )
    assert (row["train/nonfinite_steps"], row["grad_norm"]) == (1.0, 0.0)
    assert "time/logprob_s" not in row
    assert row["mismatch/k3"] > 0
    assert row["entropy"] > 0
