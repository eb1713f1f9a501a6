"""A trial run of a reward function (`mrl reward test`).

The trial times the function, and finds problems that would spoil a training run. Every row is
scored twice with all of its completions. For the first NUM_ROWS_ALONE rows, each completion is also
scored alone, as the runner does after a failure. Every problem becomes a `Finding` of one of the
kinds in PROBLEMS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mrl.rewards.base import HANG, RewardError, total_of
from mrl.rewards.trial_cases import SPELLINGS, Case
from mrl.rewards.worker_calls import call_worker
from mrl.system.json_worker import JsonWorker

PROBLEMS = {
    "hang": "gave no answer in time and was killed",
    "refused": "could not be reached, or its server answered with an error status",
    "exception": "raised, or its process died",
    "wrong type or length": "did not return one entry per completion",
    "not a number": "returned an entry that is neither number nor None",
    "NaN or infinite": "returned NaN or an infinite number",
    "forks": "forked, and the child process returned from the call like the worker",
    "changes": "returned another value for the same call",
    "depends on the group": "returned another value for a completion that was scored alone",
    "gold": "did not score the gold answer above the wrong ones",
    "constant": "returned the same value for everything, or for all of a row: nothing can be learned",
}
"""The kinds of findings and a description of each, in the order in which they are shown."""
MAX_HANGS = 3
"""A trial ends after the function hung on this many rows. Each such row costs the time limit twice:
once when all completions are scored, and once when the completion that causes the hang is scored
alone."""
NUM_ROWS_ALONE = 8
TOLERANCE = 1e-6
"""Allowed difference, relative or absolute, between the rewards of a completion in two equal calls."""
ALONE_TOLERANCE = 1e-2
"""Relative tolerance for a completion that is scored alone, because bfloat16 rounds differently
with another batch size."""
MAX_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Finding:
    kind: str
    source: str
    """The row that causes the finding, as `file:line`; empty if no single row is the cause."""
    detail: str


@dataclass
class Trial:
    """The results, so far, of a trial run of a reward."""

    findings: list[Finding] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """For each row whose first call succeeded, the seconds that this call took."""
    values: list[float] = field(default_factory=list)
    num_rows: int = 0
    """Number of rows that were tried. After too many hangs, the remaining rows are not tried."""
    num_unscored: int = 0
    num_compared: int = 0
    """Number of rows that have at least two different completions, and whose completions all have a
    reward."""
    num_level: int = 0
    """How many of the `num_compared` rows give all completions the same reward."""
    num_gold: int = 0
    """Number of rows that have a gold answer and were scored without a failure."""
    num_right: dict[str, int] = field(default_factory=dict)
    """For each spelling of the gold answer (SPELLINGS), the number of rows in which the answer in
    that spelling scored above every wrong completion."""

    def add(self, kind: str, case: Case, detail: str) -> None:
        known = (
            kind if kind in PROBLEMS else RewardError.kind
        )  # a server may report an unknown kind
        self.findings.append(Finding(known, case.source, detail))

    def num_hangs(self) -> int:
        return len({found.source for found in self.findings if found.kind == HANG})


def run_trial(
    worker: JsonWorker,
    cases: list[Case],
    encode: Callable[[str], list[int]],
    timeout_s: float,
) -> Trial:
    """Call the reward function for every case, and return the results.

    The function runs in `worker`, which has been started. `encode` returns the token ids of a text.
    The trial ends early after hangs on MAX_HANGS rows.
    """
    trial = Trial()
    for number, case in enumerate(cases):
        if trial.num_hangs() >= MAX_HANGS:
            break
        trial.num_rows += 1
        num_returned_forks = worker.num_returned_forks
        _try_case(trial, worker, case, encode, timeout_s, alone=number < NUM_ROWS_ALONE)
        if worker.num_returned_forks > num_returned_forks:
            trial.add("forks", case, "a child of os.fork() must end with os._exit()")
    scored = trial.values
    if len(scored) > 1 and all(_same(value, scored[0]) for value in scored):
        detail = f"all {len(scored)} values are {scored[0]:g}"
        trial.findings.append(Finding("constant", "", detail))
    elif trial.num_compared > 1 and trial.num_level == trial.num_compared:
        detail = f"in each of {trial.num_compared} rows all completions have the same value"
        trial.findings.append(Finding("constant", "", detail))
    if not scored and trial.num_unscored:
        trial.findings.append(Finding("constant", "", "it returned None for all completions"))
    return trial


def _try_case(
    trial: Trial,
    worker: JsonWorker,
    case: Case,
    encode: Callable[[str], list[int]],
    timeout_s: float,
    *,
    alone: bool,
) -> None:
    call = _Caller(worker, timeout_s)
    start = time.perf_counter()
    first = call(case.request(encode))
    if isinstance(first, _Failure):
        _blame(trial, call, case, encode, first)
        return
    trial.seconds.append(time.perf_counter() - start)
    trial.num_unscored += first.count(None)
    trial.values += [value for value in first if value is not None]
    if len(set(case.texts)) > 1 and None not in first:
        trial.num_compared += 1
        trial.num_level += all(_same(value, first[0]) for value in first)
    _compare_gold(trial, case, first)
    again = call(case.request(encode))
    if _report_change(trial, case, "changes", first, again) or not alone or len(first) == 1:
        return
    for index, value in enumerate(first):
        one = call(case.request(encode, index))
        if _report_change(trial, case, "depends on the group", [value], one, at=index):
            return


@dataclass(frozen=True)
class _Failure:
    kind: str
    text: str
    broken: bool
    """Whether the call failed in a way that would not change if each completion were scored alone."""


class _Caller:
    """Sends requests to the worker. A call returns the rewards, or the failure of the request."""

    def __init__(self, worker: JsonWorker, timeout_s: float) -> None:
        self._worker, self._timeout_s = worker, timeout_s

    def __call__(self, request: dict[str, Any]) -> list[float | None] | _Failure:
        reply = call_worker(self._worker, request, self._timeout_s)
        if "error" in reply:
            return _Failure(reply["kind"], reply["error"], reply["broken"])
        return [total_of(entry) for entry in reply["rewards"]]


def _blame(
    trial: Trial,
    call: _Caller,
    case: Case,
    encode: Callable[[str], list[int]],
    failure: _Failure,
) -> None:
    """Add a finding after the call with all completions of a row has failed.

    The finding names the first completion that also fails when it is scored alone, if there is one.
    """
    culprit = "no completion fails when it is scored alone"
    if len(case.texts) == 1:
        culprit = _quote(case, 0)
    elif not failure.broken:
        for index in range(len(case.texts)):
            alone = call(case.request(encode, index))
            if isinstance(alone, _Failure):
                failure, culprit = alone, _quote(case, index)
                break
    trial.add(failure.kind, case, f"{failure.text}; {culprit}")


def _report_change(
    trial: Trial,
    case: Case,
    kind: str,
    before: list[float | None],
    after: list[float | None] | _Failure,
    at: int = 0,
) -> bool:
    if isinstance(after, _Failure):
        trial.add(after.kind, case, f"in a second call: {after.text}")
        return True
    for index, (one, two) in enumerate(zip(before, after, strict=True), start=at):
        if not _same(one, two, ALONE_TOLERANCE if kind == "depends on the group" else TOLERANCE):
            trial.add(kind, case, f"{_show(one)}, then {_show(two)}; {_quote(case, index)}")
            return True
    return False


def _compare_gold(trial: Trial, case: Case, values: list[float | None]) -> None:
    """Compare the scores of the gold answer's spellings with the scores of the wrong completions,
    and update the counts of `trial`.

    A finding is added if no spelling of the gold answer scores above every wrong completion.
    Nothing is compared if the case has no gold answer.
    """
    if not case.num_gold:
        return
    trial.num_gold += 1
    wrong = [-math.inf if value is None else value for value in values[case.num_gold :]]
    highest = max(wrong)
    num_right = 0
    for (name, _), value in zip(SPELLINGS, values[: case.num_gold], strict=True):
        is_right = value is not None and value > highest
        trial.num_right[name] = trial.num_right.get(name, 0) + is_right
        num_right += is_right
    if not num_right:
        gold = ", ".join(_show(value) for value in values[: case.num_gold])
        worst = case.num_gold + wrong.index(highest)
        trial.add(
            "gold", case, f"gold {_shorten(case.texts[0])} scores {gold}; wrong "
            f"{_shorten(case.texts[worst])} scores {_show(values[worst])}"
        )  # fmt: skip


def _same(one: float | None, two: float | None, tolerance: float = TOLERANCE) -> bool:
    if one is None or two is None:
        return one is two
    return math.isclose(one, two, rel_tol=tolerance, abs_tol=TOLERANCE)


def _show(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"


def _quote(case: Case, index: int) -> str:
    return f"completion {_shorten(case.texts[index])}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "...")
