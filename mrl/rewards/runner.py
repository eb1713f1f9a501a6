"""Calls reward functions in worker processes that can be killed.

A run thus survives a reward function that raises, hangs or ends its process.

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
"""Maximum number of rows that a message names; further rows are only counted."""
_RESERVED = ("prompts", "completions", "completion_ids")


class RewardFailed(Exception):
    """A call of a reward function returned no usable rewards. The message says why."""


class RewardBroken(RewardFailed):
    """A call failed in a way that would not change if its samples were scored one by one. For
    example, the result does not have one entry per completion. No sample of the call has a
    reward."""


@dataclass(frozen=True)
class RewardReport:
    """The failures that occurred while a step was scored."""

    num_failed: int = 0
    """Number of samples that are masked because a reward function raised, hung, died or returned
    something invalid."""
    num_unscored: int = 0
    """Number of samples that are masked because every reward function returned None."""
    first_error: str = ""
    num_repeated: int = 0
    """Number of groups for which a call with all samples failed, after which the group's samples
    were scored one by one. Calls of different reward functions count separately."""
    rows: tuple[str, ...] = ()
    """The prompts whose samples failed, each as `file:line`, without duplicates."""


class RewardRunner(Closing):
    """Scores samples in one worker process per reward function.

    A worker that hangs or dies is started again at the next call. Raises InputError if a reward
    function cannot be loaded. Not thread-safe. Create a runner on a thread that lives as long as
    the run, because workers are killed when the thread that started them ends.
    """

    def __init__(
        self,
        rewards: str | Sequence[RewardConfig],
        timeout_s: float,
        budget: Budget | None = None,
        user: WorkerUser | None = None,
    ) -> None:
        """Start the workers.

        A call may take `timeout_s` seconds, or fewer if less time is left of the step's `budget`.
        The workers run as `user`, or as this process's user if `user` is None.
        """
        self._timeout_s, self._budget = timeout_s, budget or Budget()
        self._terms = terms_of(rewards)
        self._workers = [reward_worker(term.path, timeout_s, user) for term in self._terms]
        self.report = RewardReport()
        """The failures of the current step. `begin_step` clears the report."""
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
        """Return the rewards of a step's groups, f32[G] per group, and set `report`.

        The reward of a sample is NaN if a function failed on the sample, or if all functions
        returned None. `completions[i][j]` is the text of `groups[i].samples[j]`. `step_samples` is
        the number of samples of the step over all engines, by default the number of samples given
        here. A call that fails is repeated sample by sample, so that only the samples that cause
        the failure are masked.

        Raises RunFailed as soon as more than 5% of the step's samples have failed.
        """
        self.begin_step()
        num_samples = step_samples or sum(len(group.samples) for group in groups)
        return [
            self.score_group(group, texts, step_samples=num_samples)
            for group, texts in zip(groups, completions, strict=True)
        ]

    def begin_step(self) -> None:
        """Clear `report` at the beginning of a step."""
        self.report = RewardReport()

    def score_group(self, group: SampleGroup, texts: list[str], *, step_samples: int) -> Tensor:
        """Return the rewards of one group of the step, f32[G], and update `report`.

        `group.reward_parts` is also set; it is None for a single reward without parts. The
        docstring of `score` explains NaN rewards and `step_samples`, and says when RunFailed is
        raised.
        """
        request = _request(group, texts)
        entries: list[list[Entry]] = []
        failed: dict[int, str] = {}
        for number in range(len(self._terms)):
            values, errors = self._call_term(number, request, group.prompt.source)
            entries.append(values)
            failed = errors | failed  # keep the error of the first reward that failed
        for error in failed.values():
            self._count_failure(error, group.prompt.source, step_samples)
        totals, parts = combined(self._terms, entries, failed)
        group.reward_parts = parts or None
        num_unscored = sum(map(math.isnan, totals)) - len(failed)
        self.report = replace(self.report, num_unscored=self.report.num_unscored + num_unscored)
        return torch.tensor(totals, dtype=torch.float32)

    def close(self) -> None:
        """Kill the workers and their child processes; they are not started again.

        If another thread is still scoring samples, its call fails. `close` may be called more than
        once.
        """
        for worker in self._workers:
            worker.close()

    def _call_term(
        self, number: int, request: dict[str, Any], source: str
    ) -> tuple[list[Entry], dict[int, str]]:
        """Return one reward function's entries for all samples of a group, and a dict of error
        messages by sample index.

        Only samples on which the function failed have an error message; their entry is None.
        """
        size = len(request["completions"])
        none: list[Entry] = [None] * size
        try:
            return self._call(number, request), {}
        except RewardBroken as error:
            return none, dict.fromkeys(range(size), str(error))
        except RewardFailed as error:
            if size == 1:  # there is only one possible culprit
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
        """Call one reward function, and return its entries.

        Raises RewardFailed if the call fails. The next call restarts a worker that has hung or died.
        """
        with self._budget.spending(self._timeout_s) as timeout_s:
            reply = call_worker(self._workers[number], request, timeout_s)
        if "error" in reply:
            name = f"{self._terms[number].name}: " if len(self._terms) > 1 else ""
            raise (RewardBroken if reply["broken"] else RewardFailed)(name + reply["error"])
        return reply["rewards"]


def _one(request: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of the request that has only the sample `index`."""
    part = slice(index, index + 1)
    return request | {
        "prompts": request["prompts"][part],
        "completions": request["completions"][part],
        "columns": {name: values[part] for name, values in request["columns"].items()},
    }


def reward_names(rewards: Sequence[RewardConfig]) -> str:
    """Return the names of rewards as text for a message, such as `rewards 'a', 'b'`."""
    names = [term.path for term in rewards]
    return f"reward{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"


def shown_rows(rows: Sequence[str]) -> str:
    """Return text for a message with the first MAX_ROWS of `rows` and the number of further rows.

    The text is empty if there are no rows.
    """
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    return f"rows {', '.join(rows[:MAX_ROWS])}{more}" if rows else ""


def check_failures(
    what: str,
    num_failed: int,
    num_samples: int,
    first_error: str = "see the warnings above",
    rows: Sequence[str] = (),
) -> None:
    """Raise RunFailed if scoring has failed for more than 5% of a step's samples.

    In the message, `what` names the reward functions or the environment. `rows` has `file:line` of
    the prompts whose samples failed; it may be empty.
    """
    if num_failed > MAX_FAILED_SHARE * num_samples:
        is_named = len(rows) == 1 and first_error.startswith(rows[0])
        named = f"; {shown_rows(rows)}" if rows and not is_named else ""
        raise RunFailed(
            f"{what} failed on {num_failed} of {num_samples} samples of this step, more "
            f"than {MAX_FAILED_SHARE:.0%}; first error: {first_error}{named}"
        )


def check_columns(prompt: Prompt) -> None:
    """Raise InputError if a column of the row has the name of an argument of the reward call."""
    clash = [name for name in _RESERVED if name in prompt.columns]
    if clash:
        raise InputError(
            f"{prompt.source}: column {clash[0]!r} is the name of an argument of the reward call; "
            "rename it"
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
