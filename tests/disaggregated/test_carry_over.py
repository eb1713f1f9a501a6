"""What becomes of prompts that wait when a run is resumed with another placement, bound or batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch.distributed as dist

from mrl.collect.saved import SavedCollector
from mrl.config import load_recipe
from tests.disaggregated.resumed_runs import KINDS, ROOT, Run, old_state, recipe_of


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has nobody to tell."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda said: None)
    monkeypatch.setattr(dist, "barrier", lambda: None)


QUICK = ("colocated", "fixed 1", "fixed 3", "free 1", "free 3")
QUICK_PAIRS = [(first, QUICK) for first in QUICK]
ALL_PAIRS = [pytest.param(first, KINDS, marks=pytest.mark.release) for first in KINDS]


@pytest.mark.parametrize(("first", "others"), [*QUICK_PAIRS, *ALL_PAIRS])
def test_no_prompt_is_lost_or_trained_on_twice_or_beyond_the_new_bound(
    first: str, others: Sequence[str]
) -> None:
    for number, second in enumerate(others):
        run = Run(number)
        for num_steps, kind in ((5, first), (3, second), (2, first), (2, second)):
            run.go_on(num_steps, KINDS[kind])
            run.check()


def test_what_the_new_bound_allows_is_not_generated_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ahead = {str(i) for i in range(16, 28)}  # of steps 4 to 6
    for kind in ("fixed 3", "free 3"):
        run = Run(0)
        run.go_on(4, KINDS["fixed 3"])
        run.go_on(3, KINDS[kind])
        trained = [line for line in run.trained if line in ahead]
        assert len(trained) == len(ahead)
        assert "generated again" not in capfd.readouterr().out
    run = Run(0)
    run.go_on(4, KINDS["fixed 3"])
    run.go_on(1, KINDS["fixed 1"])
    assert "of 12 pending prompts of the checkpoint, 8 are generated again" in " ".join(
        capfd.readouterr().out.split()
    )
    assert run.trained[-4:] == ["24", "25", "26", "27"]  # weights 3 have sampled these
    run.go_on(2, KINDS["fixed 1"])
    assert run.trained[-8:] == [str(i) for i in range(16, 24)]


def test_saved_rollouts_in_between_lose_nothing() -> None:
    run = Run(0)
    run.go_on(4, KINDS["free 3"])
    recipe = load_recipe(
        ROOT / "launch/recipes/toy_moe.yaml", ["debug.load_rollouts=somewhere", "train.num_steps=9"]
    )
    saved = SavedCollector(recipe, cast(Any, None))
    assert run.state is not None
    saved.load_state_dict(run.state, run.step)
    run.state = saved.state_dict()
    run.go_on(3, KINDS["fixed 1"])
    run.check()
    fresh = Run(0)
    fresh.state = SavedCollector(recipe, cast(Any, None)).state_dict()
    fresh.go_on(1, KINDS["colocated"])  # from the first prompt
    assert sorted(fresh.trained) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("first", ["colocated", "colocated resume", "fixed 3", "free 3"])
def test_checkpoints_of_former_forms_lose_nothing(first: str) -> None:
    for second in ("colocated", "fixed 1", "fixed 3", "free 3"):
        run = Run(1)
        run.go_on(5, KINDS[first])
        assert run.state is not None
        run.state = old_state(first, run.state)
        run.go_on(3, KINDS[second])
        run.check()
        if first == second == "free 3":
            tally = cast(Any, run.collector.pool).coordinator.leases.ledger.tally
            assert (tally.duplicates, tally.dropped["empty"]) == (2, 1)


def test_prompts_of_other_data_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(0)
    run.go_on(4, KINDS["fixed 3"])
    assert run.state is not None
    recipe = recipe_of(KINDS["fixed 3"])
    run._collector(recipe).load_state_dict(run.state, 4, other_data=True)
    said = " ".join(capfd.readouterr().out.split())
    assert "the data has changed: 12 pending prompts of the checkpoint" in said
