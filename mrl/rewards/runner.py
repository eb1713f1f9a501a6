"""Calls the reward function in a killable worker, so that the run survives one that raises, hangs or
dies.

Dimensions: G samples of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl.config import RewardConfig
from mrl.errors import InputError, RunFailed
from mrl.rewards.base import Entry
from mrl.rewards.budget import Budget
from mrl.rewards.terms import combined, terms_of
from mrl.rewards.worker_calls import call_worker, reward_worker
from mrl.system.processes import Closing
from mrl.system.worker_user import WorkerUser
from mrl.types import Prompt, SampleGroup

MAX_FAILED_SHARE = 0.05
MAX_ROWS = 5
"""Rows that a message names; the others are counted."""
_RESERVED = ("prompts", "completions", "completion_ids")


class RewardFailed(Exception):
    """One call gave no usable rewards; the message says why."""


class RewardBroken(RewardFailed):
    """The answer was not one number or None a completion: no sample of the call has a reward."""


@dataclass(frozen=True)
class RewardReport:
    """A `RewardReport` says what went wrong while a step was scored."""

    num_failed: int = 0
    """Samples masked because the reward function raised, hung, died or returned nonsense."""
    num_unscored: int = 0
    """Samples masked because the reward function returned None."""
    first_error: str = ""
    num_repeated: int = 0
    """Calls for a group that failed, so that its samples were scored one at a time."""
    rows: tuple[str, ...] = ()
    """`file:line` of the prompts whose samples failed, each once."""


class RewardRunner(Closing):
    """Keeps a worker process for each reward function, and restarts one that hangs or dies.

    Raises InputError if a reward function cannot be loaded. Not thread-safe; create it on the
    thread that lives as long as the run (the workers die with the thread that started them).
    """

    def __init__(
        self,
        rewards: str | Sequence[RewardConfig],
        timeout_s: float,
        budget: Budget | None = None,
        user: WorkerUser | None = None,
    ) -> None:
        """A call may take `timeout_s`, and what is left of `budget` if that is less. The workers run as
        `user`; None is that of this process."""
        self._timeout_s, self._budget = timeout_s, budget or Budget()
        self._terms = terms_of(rewards)
        self._workers = [reward_worker(term.path, timeout_s, user) for term in self._terms]
        self.report = RewardReport()
        """The report of the last `score`."""
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.close()
            raise

    def score(
        self,
        groups: list[SampleGroup],
        completions: list[list[str]],
        *,
        step_samples: int | None = None,
    ) -> list[Tensor]:
        """Return the rewards, f32[G] per group; NaN where a function failed or none gave one (see
        `report`).

        `completions[i][j]` is the text of `groups[i].samples[j]`; `step_samples` counts the samples
        of the step over all engines, by default those given. A call that fails is repeated
        sample by sample, so that only the culprit is masked.
        Raises RunFailed as soon as more than 5% of the step's samples failed.
        """
        self.begin_step()
        num_samples = step_samples or sum(len(group.samples) for group in groups)
        return [
            self.score_group(group, texts, step_samples=num_samples)
            for group, texts in zip(groups, completions, strict=True)
        ]

    def begin_step(self) -> None:
        """Clear the report of the last step."""
        self.report = RewardReport()

    def score_group(self, group: SampleGroup, texts: list[str], *, step_samples: int) -> Tensor:
        """Score one group of the step, f32[G], and add to the report.

        Sets `group.reward_parts` where there are several rewards, or parts of one.
        """
        request = _request(group, texts)
        entries: list[list[Entry]] = []
        failed: dict[int, str] = {}
        for number in range(len(self._terms)):
            values, errors = self._call_term(number, request, group.prompt.source)
            entries.append(values)
            failed = errors | failed  # the first reward that failed on a sample counts
        for error in failed.values():
            self._count_failure(error, group.prompt.source, step_samples)
        totals, parts = combined(self._terms, entries, failed)
        group.reward_parts = parts or None
        num_unscored = sum(map(math.isnan, totals)) - len(failed)
        self.report = replace(self.report, num_unscored=self.report.num_unscored + num_unscored)
        return torch.tensor(totals, dtype=torch.float32)

    def close(self) -> None:
        """Kill the workers and whatever they started; none is started again. Harmless when repeated.

        A call that runs in another thread ends with it.
        """
        for worker in self._workers:
            worker.close()

    def _call_term(
        self, number: int, request: dict[str, Any], source: str
    ) -> tuple[list[Entry], dict[int, str]]:
        """Return one reward's entries for the samples, and why those that have none failed, by
        their place."""
        size = len(request["completions"])
        none: list[Entry] = [None] * size
        try:
            return self._call(number, request), {}
        except RewardBroken as error:
            return none, dict.fromkeys(range(size), str(error))
        except RewardFailed as error:
            if size == 1:  # nothing to tell apart
                return none, {0: str(error)}
            self.report = replace(
                self.report,
                num_repeated=self.report.num_repeated + 1,
                first_error=self.report.first_error or f"{source}: {error}",
            )
        failed: dict[int, str] = {}
        for index in range(size):
            try:
                (none[index],) = self._call(number, _one(request, index))
            except RewardFailed as error:
                failed[index] = str(error)
        return none, failed

    def _count_failure(self, error: str, source: str, num_samples: int) -> None:
        report = self.report
        rows = report.rows if source in report.rows else (*report.rows, source)
        self.report = report = replace(
            report,
            num_failed=report.num_failed + 1,
            first_error=report.first_error or f"{source}: {error}",
            rows=rows,
        )
        what = reward_names(self._terms)
        check_failures(what, report.num_failed, num_samples, report.first_error, rows)

    def _call(self, number: int, request: dict[str, Any]) -> list[Entry]:
        """Make one call. Raises RewardFailed; a hung or dead worker is gone by then."""
        with self._budget.spending(self._timeout_s) as timeout_s:
            reply = call_worker(self._workers[number], request, timeout_s)
        if "error" in reply:
            name = f"{self._terms[number].name}: " if len(self._terms) > 1 else ""
            raise (RewardBroken if reply["broken"] else RewardFailed)(name + reply["error"])
        return reply["rewards"]


def _one(request: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the request for one of its samples."""
    part = slice(index, index + 1)
    return request | {
        "prompts": request["prompts"][part],
        "completions": request["completions"][part],
        "columns": {name: values[part] for name, values in request["columns"].items()},
    }


def reward_names(rewards: Sequence[RewardConfig]) -> str:
    """Return what messages call these rewards."""
    names = [term.path for term in rewards]
    return f"reward{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


def shown_rows(rows: Sequence[str]) -> str:
    """Return the first few of the rows, for a message."""
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    return f"rows {', '.join(rows[:MAX_ROWS])}{more}" if rows else ""


def check_failures(
    what: str,
    num_failed: int,
    num_samples: int,
    first_error: str = "see the warnings above",
    rows: Sequence[str] = (),
) -> None:
    """Raise RunFailed where a fault costs more than 5% of a step's samples their reward.

    `rows`: `file:line` of the prompts of these samples, where they are known.
    """
    if num_failed > MAX_FAILED_SHARE * num_samples:
        named = f"; {shown_rows(rows)}" if rows else ""
        raise RunFailed(
            f"{what} failed on {num_failed} of {num_samples} samples of this step, more "
            f"than {MAX_FAILED_SHARE:.0%}; first error: {first_error}{named}"
        )


def check_columns(prompt: Prompt) -> None:
    """Raise InputError where a column of the row has a name that the reward call needs."""
    clash = [name for name in _RESERVED if name in prompt.columns]
    if clash:
        raise InputError(
            f"{prompt.source}: column {clash[0]!r} is a name the reward call needs; rename it"
        )


def _request(group: SampleGroup, texts: list[str]) -> dict[str, Any]:
    size, prompt = len(group.samples), group.prompt
    if len(texts) != size:
        raise ValueError(f"{prompt.source}: expected {size} completions, got {len(texts)}")
    check_columns(prompt)
    columns: dict[str, list[Any]] = {k: [v] * size for k, v in prompt.columns.items()}
    columns["completion_ids"] = [sample.response_ids.tolist() for sample in group.samples]
    return {
        "prompts": [prompt.content] * size,
        "completions": texts,
        "columns": columns,
        "step": max((s.version for each in group.samples for s in each.weight_versions), default=0),
    }
