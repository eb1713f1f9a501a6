"""Calls the reward function in a killable worker, so that the run survives one that raises, hangs or
dies.

Dimensions: G samples of a prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl.errors import InputError, RunFailed
from mrl.rewards.worker_calls import call_worker, reward_worker
from mrl.system.processes import Closing
from mrl.types import Prompt, SampleGroup

MAX_FAILED_SHARE = 0.05
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
    """Groups whose call failed, so that their samples were scored one at a time."""


class RewardRunner(Closing):
    """Keeps a worker process with the reward function loaded, and restarts it when it hangs or dies.

    Raises InputError if the reward function cannot be loaded. Not thread-safe; create it on the
    thread that lives as long as the run (the worker dies with the thread that started it).
    """

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._worker = reward_worker(spec, timeout_s)
        self.report = RewardReport()
        """The report of the last `score`."""
        self._worker.start()

    def score(
        self,
        groups: list[SampleGroup],
        completions: list[list[str]],
        *,
        step_samples: int | None = None,
    ) -> list[Tensor]:
        """Return the rewards, f32[G] per group; NaN where the function failed or gave none (see
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
        """Score one group of the step, f32[G], and add to the report."""
        request = _request(group, texts)
        try:
            values = self._call(request)
        except RewardBroken as error:
            for _ in texts:
                self._count_failure(error, step_samples)
            values = [math.nan] * len(texts)
        except RewardFailed as error:
            values = self._one_by_one(request, error, step_samples)
        return torch.tensor(values, dtype=torch.float32)

    def close(self) -> None:
        """Kill the worker and whatever it started; none is started again. Harmless when repeated.

        A call that runs in another thread ends with it.
        """
        self._worker.close()

    def _one_by_one(
        self, request: dict[str, Any], error: RewardFailed, num_samples: int
    ) -> list[float]:
        size = len(request["completions"])
        if size == 1:  # nothing to tell apart
            self._count_failure(error, num_samples)
            return [math.nan]
        self.report = replace(
            self.report,
            num_repeated=self.report.num_repeated + 1,
            first_error=self.report.first_error or str(error),
        )
        values = []
        for index in range(size):
            one = {
                "prompts": request["prompts"][index : index + 1],
                "completions": request["completions"][index : index + 1],
                "columns": {k: v[index : index + 1] for k, v in request["columns"].items()},
            }
            try:
                values += self._call(one)
            except RewardFailed as one_error:
                self._count_failure(one_error, num_samples)
                values.append(math.nan)
        return values

    def _count_failure(self, error: RewardFailed, num_samples: int) -> None:
        self.report = replace(
            self.report,
            num_failed=self.report.num_failed + 1,
            first_error=self.report.first_error or str(error),
        )
        check_failures(
            f"reward {self._spec!r}", self.report.num_failed, num_samples, self.report.first_error
        )

    def _call(self, request: dict[str, Any]) -> list[float]:
        """Make one call; NaN stands for None. Raises RewardFailed; a hung or dead worker is gone by
        then."""
        reply = call_worker(self._worker, request, self._timeout_s)
        if "error" in reply:
            raise (RewardBroken if reply["broken"] else RewardFailed)(reply["error"])
        values = [math.nan if value is None else float(value) for value in reply["rewards"]]
        unscored = sum(map(math.isnan, values))
        self.report = replace(self.report, num_unscored=self.report.num_unscored + unscored)
        return values


def check_failures(
    what: str, num_failed: int, num_samples: int, first_error: str = "see the warnings above"
) -> None:
    """Raise RunFailed where a fault costs more than 5% of a step's samples their reward."""
    if num_failed > MAX_FAILED_SHARE * num_samples:
        raise RunFailed(
            f"{what} failed on {num_failed} of {num_samples} samples of this step, more "
            f"than {MAX_FAILED_SHARE:.0%}; first error: {first_error}"
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
    return {"prompts": [prompt.content] * size, "completions": texts, "columns": columns}
