"""The scheduling policy: who is trained next, whose requests are admitted, who rolls out together."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mrl.service import schedule
from tests.tenants import memory_checks, schedule_checks

CHECKS = [*schedule_checks.QUEUE_CHECKS, *memory_checks.MEMORY_CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(seed=3685)  # a tenant joins while the costliest one is paused
def test_holds(check: Callable[[ModuleType, int], None], seed: int) -> None:
    check(schedule, seed)


def test_wrong_calls_are_refused() -> None:
    queue = schedule.TrainingQueue(1.0)
    queue.join("a")
    for call in (
        lambda: queue.join("a"),
        lambda: queue.join("b", 0.0),
        lambda: queue.join("b", float("nan")),
        lambda: schedule.TrainingQueue(float("inf")),
        lambda: schedule.Admission(0.0),
    ):
        with pytest.raises(ValueError, match=r"tenant a is|got "):
            call()
    with pytest.raises(RuntimeError, match="call take"):
        queue.done(1.0)
    with pytest.raises(KeyError):
        queue.ready("b", 0.0)
    queue.ready("a", 0.0)
    assert queue.take(0.0) == "a"
    for call in (lambda: queue.take(0.0), lambda: queue.leave("a")):
        with pytest.raises(RuntimeError, match="the update of a is under way"):
            call()
    with pytest.raises(ValueError, match="seconds: got nan"):
        queue.done(float("nan"))
    assert queue.running == "a", "the update goes on after a refused call"


MUTATIONS = {
    "no debt is forgiven below zero": ("left if left > ROUNDING_S else 0.0", "left"),
    "nobody is forgiven": ("left = entry.debt_s - forgiven", "left = entry.debt_s - 0.0 * forgiven"),
    "only those in line are forgiven": ("for entry in self._entries.values():\n            left",
                                        "for entry in line:\n            left"),
    "forgiven regardless of weight": ("forgiven * entry.weight", "forgiven"),
    "an update counts as one second": ("entry.debt_s += seconds", "entry.debt_s += 1.0"),
    "what is forgiven ignores weights": ("min(entry.debt_s / entry.weight", "min(entry.debt_s"),
    "debts do not matter": ("key=lambda entry: (entry.debt_s / entry.weight, ", "key=lambda entry: ("),
    "ties by the last that joined": ("/ entry.weight, entry.number)", "/ entry.weight, -entry.number)"),
    "no bound on the wait": ("if start > entry.latest:", "if False:"),
    "the bound forgets the update that overtakes": ("start = now + chosen.cost_s", "start = now"),
    "the bound forgets those in line before": ("start += entry.cost_s", "pass"),
    "the first in line is overtaken freely": ("line[: line.index(chosen)]",
                                              "line[1 : line.index(chosen)]"),
    "the bound on top of the load": ("now + max(self.max_wait_s, ahead)",
                                     "now + self.max_wait_s + ahead"),
    "costs are never learned": ("entry.expected_s = max(seconds", "entry.expected_s = 0 * max(seconds"),
    "the line is in the order of joining": ("entry: entry.place", "entry: entry.number"),
    "ties in line by the order of joining": ("entry: entry.place",
                                             "entry: (entry.since, entry.number)"),
    "a second ready() starts the wait anew": ("if not entry.has_samples:", "if True:"),
    "a join forgives all": ("        self._count += 1",
                            "        self._count += 1\n"
                            "        for e in self._entries.values(): e.debt_s = 0.0"),
    "the start of the update is forgotten": ("        self._started = now\n", ""),
    "more than fits": ("if cost > free_tokens:", "if free_tokens < 1:"),
    "no limit of a tenant": (" or held > each.max_tokens_in_flight:", ":"),
    "more than wait": ("granted[each.tenant] == each.num_waiting or ", ""),
    "shares by requests, not tokens": ("(held / each.weight, place)",
                                       "(granted[each.tenant] / each.weight, place)"),
    "shares forget what is in flight": ("[(d.tokens_in_flight / d.weight,", "[(0.0 / d.weight,"),
    "memory weights are ignored": ("held / each.weight,", "held,"),
    "what one leaves is not used": ("each.max_tokens_in_flight:\n                continue",
                                    "each.max_tokens_in_flight:\n                break"),
    "large requests are passed forever": ("self._passed.get(tenant, 0) >= capacity_tokens", "False"),
    "large requests are never passed": ("self._passed.get(tenant, 0) >= capacity_tokens", "True"),
    "large requests are passed anew": ("self._passed.get(tenant, 0) + cost", "cost"),
    "over-commit without a bound": ("math.ceil(max(expected, max_tokens / self.max_over_commit))",
                                    "math.ceil(expected)"),
    "lengths are expected without a bound": ("min(max_tokens, math.ceil(", "max(0, math.ceil("),
    "the first lengths count alone": ("PRIOR = 8", "PRIOR = 1e-9"),
    "a phase of any size": ("if end <= room]", "]"),
    "a phase passes the large over": ("ends = itertools.accumulate(wanting.values())",
                                      "ends = list(wanting.values())"),
    "a phase of too many": ("fits[: self.max_tenants]", "fits"),
    "a phase of nobody": (" or list(wanting)[:1]", ""),
}  # fmt: skip
"""Planted bugs: the text of the module that each replaces."""
SEEDS = range(8)


@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    old, new = MUTATIONS[bug]
    assert schedule.__spec__ is not None
    source = Path(schedule.__spec__.origin or "").read_text()
    assert source.count(old) == 1, f"the text of the bug is there {source.count(old)} times: {old}"
    planted = importlib.util.module_from_spec(schedule.__spec__)
    exec(compile(source.replace(old, new), bug, "exec"), planted.__dict__)
    assert any(fails(check, planted, seed) for seed in SEEDS for check in CHECKS), (
        f"not caught: {bug}"
    )


def fails(check: Callable[[ModuleType, int], None], planted: ModuleType, seed: int) -> bool:
    try:
        check(planted, seed)
    except (AssertionError, RuntimeError):
        return True
    return False
