"""Scoring gives groups their rewards as they come back, while the engine generates the others."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from mrl.config import Recipe
from mrl.data.completions import completions
from mrl.environments.beside import EpisodesBeside
from mrl.environments.runner import EnvironmentRunner
from mrl.errors import RunFailed
from mrl.rewards.budget import Budget
from mrl.rewards.runner import RewardRunner, shown_rows
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.worker_user import WorkerUser
from mrl.types import Prompt, SampleGroup


class Scoring:
    """Runs the reward function or the environments of one engine's share, in processes of their own."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        budget: Budget | None = None,
        user: WorkerUser | None = None,
    ) -> None:
        """`budget` is what all calls of a step may take together, `user` whom the processes belong to;
        None is that of this process."""
        self._tokenizer = tokenizer
        self._step_samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
        self._rewards: RewardRunner | None = None
        self.environments: EnvironmentRunner | None = None
        """The environments that give the rewards of conversations; None where a function gives them."""
        # One thread for the whole run: a worker process exits when the thread that started it ends.
        self._thread = ThreadPoolExecutor(1)
        self._begun: list[tuple[SampleGroup, Future[Tensor] | None]] = []
        self._num_scored = 0
        """Samples that `score` was given since the last report."""
        self._of_sources: dict[str, RewardRunner] = {}
        """The rewards that sources of the data have of their own, by `Prompt.reward`."""
        with ExitStack() as undo:  # where one cannot be loaded, the others' processes end
            undo.callback(self.close)
            if recipe.environment is not None:
                self.environments = EnvironmentRunner(recipe.environment, budget, user)
            elif recipe.reward is not None:
                self._rewards = RewardRunner(recipe.reward, recipe.reward_timeout_s, budget, user)
            for key, rewards in recipe.data.rewards.items():
                self._of_sources[key] = RewardRunner(rewards, recipe.reward_timeout_s, budget, user)
            undo.pop_all()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._begun, self._num_scored = [], 0
        for runner in self._runners:
            runner.begin_step()
        if self.environments is not None:
            self.environments.begin_counts()

    def episodes(self) -> EpisodesBeside | None:
        """Return what plays the conversations of one group beside others; None without environments."""
        return None if self.environments is None else EpisodesBeside(self.environments)

    def begin(self, group: SampleGroup) -> None:
        """Start scoring a whole group; returns at once. Groups that have rewards keep them."""
        runner = self._runner_of(group.prompt)
        if runner is None:
            self._begun.append((group, None))
            return
        (texts,) = completions([group], self._tokenizer)  # the group keeps them
        future = self._thread.submit(
            runner.score_group, group, texts, step_samples=self._step_samples
        )
        self._begun.append((group, future))

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Return the groups with their rewards in the order of their ids, and how many samples failed.

        Raises RunFailed where more than 5% of the step's samples failed.
        """
        for group, rewards in self._begun:
            if rewards is not None:
                group.rewards = rewards.result()
                beat()
        groups = sorted((g for g, _ in self._begun), key=lambda group: group.samples[0].group_id)
        return groups, self._report_failures()

    def score(self, group: SampleGroup) -> tuple[SampleGroup, int]:
        """Score one group that belongs to no step yet; return it, and how many samples failed.

        For any thread. Failures are reported, and are too many, over as many groups as a step has.
        """
        return self._thread.submit(self._score, group).result()

    def _score(self, group: SampleGroup) -> tuple[SampleGroup, int]:
        if self._num_scored >= self._step_samples:
            self._begun = [(group, None)]
            self._report_failures()
            self.begin_step()
        self._num_scored += len(group.samples)
        runner = self._runner_of(group.prompt)
        if runner is None:
            return group, 0
        before = runner.report.num_failed
        (texts,) = completions([group], self._tokenizer)
        group.rewards = runner.score_group(group, texts, step_samples=self._step_samples)
        return group, runner.report.num_failed - before

    def _runner_of(self, prompt: Prompt) -> RewardRunner | None:
        """Return the reward that scores a prompt; None if an environment does, or nothing.

        Raises RunFailed for a prompt of a source whose reward the recipe does not have.
        """
        if prompt.reward is None:
            return self._rewards
        if prompt.reward not in self._of_sources:
            known = ", ".join(self._of_sources) or "none"
            raise RunFailed(
                f"{prompt.source}: the prompt has the reward {prompt.reward}, but the recipe's sources "
                f"have {known}; restore that reward, or start a new run"
            )
        return self._of_sources[prompt.reward]

    @property
    def _runners(self) -> list[RewardRunner]:
        return [*([] if self._rewards is None else [self._rewards]), *self._of_sources.values()]

    def close(self) -> None:
        """Leave no process behind. Harmless when repeated."""
        for runner in self._runners:
            runner.close()
        if self.environments is not None:
            self.environments.close()
        self._thread.shutdown(cancel_futures=True)

    def _report_failures(self) -> int:
        """Warn of samples that are masked because their scoring failed, and return their number."""
        if not self._begun:  # the environments still hold the count of the round before
            return 0
        if self.environments is not None:
            environments = self.environments
            if environments.num_failed:
                console.warning(
                    f"{environments.what} failed in {environments.num_failed} episodes, which are "
                    f"masked ({environments.num_replayed} others were played again): "
                    f"{environments.first_error}"
                )
            return environments.num_failed
        for report in (runner.report for runner in self._runners):
            if report.num_failed or report.num_repeated:
                console.warning(
                    f"the reward function failed on {report.num_repeated} groups, scored again one by "
                    f"one; {report.num_failed} samples masked: {report.first_error}"
                    + (f"; {shown_rows(report.rows)}" if report.rows else "")
                )
        return sum(runner.report.num_failed for runner in self._runners)
