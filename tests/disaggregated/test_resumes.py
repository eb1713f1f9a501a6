"""Real runs that are resumed with another placement, bound, batch size and number of engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from mrl.run.folder import RunFolder
from tests.disaggregated.test_runs import AHEAD, APART, model, rows, train

__all__ = ["model"]
pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

TWO = ("rollout.placement=disaggregated", "rollout.num_ranks=2")
SMALLER = "rollout.prompts_per_step=2"
CHAINS = {
    "one engine": (
        ("colocated", 1, 0, ()),
        ("free 2", 2, 2, (*APART, "async.max_staleness=2")),
        ("fixed 1", 2, 1, (*AHEAD, "async.max_staleness=1")),
        ("colocated", 1, 0, ()),
        ("fixed 2", 2, 2, (*AHEAD, "async.max_staleness=2")),
        ("free 1", 2, 1, (*APART, "async.max_staleness=1")),
    ),
    "two engines": (
        ("free 3", 3, 3, (*TWO, "async.max_staleness=3")),
        ("fixed 1, smaller steps", 2, 1, (*AHEAD, "async.max_staleness=1", SMALLER)),
        ("fixed 0", 2, 0, APART),
        ("free 2, smaller steps", 3, 2, (*TWO, "async.max_staleness=2", SMALLER)),
        ("colocated", 1, 0, ()),
    ),
}
"""What a run is resumed with: a name, the ranks, the bound, and the keys."""
STEPS = 3
ALLOWED = ("--allow", "async", "rollout")


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_goes_through_placements_and_bounds(
    chain: Sequence[tuple[str, int, int, Sequence[str]]], model: Path, tmp_path: Path
) -> None:
    output, trained = tmp_path / "run", Counter[str]()
    for number, (name, ranks, bound, keys) in enumerate(chain):
        first, last = number * STEPS, (number + 1) * STEPS
        more = (*keys, "algorithm.importance=tis", f"train.num_steps={last}")
        train(model, output, ranks, *more, *(ALLOWED if number else ()))
        for row in rows(output)[first:last]:
            assert row["staleness/max"] <= bound, name
            assert row.get("async/lost_workers", 0) == 0, name
            lines = RunFolder(output).read_rollouts(int(row["step"]))
            assert len(lines) == 4 * (2 if SMALLER in keys else 4)
            trained.update({line["prompt_id"] for line in lines})
        print(f"{name}: {trained.total()} prompts trained, {len(trained)} different")
    assert [row["step"] for row in rows(output)] == list(range(len(chain) * STEPS))
    assert set(trained.values()) == {1}
