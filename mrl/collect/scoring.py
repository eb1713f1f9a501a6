"""Scores groups as soon as they are complete, while the engine generates further groups."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mrl.collect.endpoint.rollout import GroupAgents
from mrl.collect.multi_turn import GroupEnvironments
from mrl.config import Recipe
from mrl.config.reward import Rewards
from mrl.data.completions import completions
from mrl.environments.runner import EnvironmentRunner
from mrl.errors import RunFailed
from mrl.rewards.budget import Budget
from mrl.rewards.judged import judged
from mrl.rewards.runner import RewardRunner, shown_rows
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.worker_user import WorkerUser
from mrl.types import Prompt, SampleGroup

if TYPE_CHECKING:
    from mrl.collect.endpoint.agents import Agents


class Scoring:
    """Runs the reward functions or environments for one engine's groups, in worker processes."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        budget: Budget | None = None,
        user: WorkerUser | None = None,
    ) -> None:
        """`budget` limits the total time of all calls in a step; None sets no limit. The processes
        run as `user`; None means the user of this process."""
        self._tokenizer = tokenizer
        self._step_samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
        self._runners: dict[str | None, RewardRunner] = {}
        """The runners of reward functions. The key is the `Prompt.reward` of the prompts that a
        runner scores; it is None for the recipe's own reward."""
        self.environments: EnvironmentRunner | None = None
        """The environments of conversations; None if the recipe has no environment of this kind."""
        self.agents: Agents | None = None
        """The agents of a recipe whose environment has some (`is_agent`); else None."""
        # Workers are started in this thread, and exit when it ends, so it lives as long as the run.
        self._thread = ThreadPoolExecutor(1)
        self._begun: list[tuple[SampleGroup, Future[Tensor] | None]] = []
        self._num_scored = 0
        """Number of samples that `score` has scored since the last report."""
        rewards: dict[str | None, Rewards] = {**recipe.data.rewards}
        has_environment = recipe.environment is not None and recipe.environment.gives_rewards
        if not has_environment and recipe.reward is not None:
            rewards = {None: recipe.reward, **rewards}
        with ExitStack() as undo:  # if a reward cannot be loaded, end the processes of the others
            undo.callback(self.close)
            if recipe.environment is not None and recipe.environment.is_agent:
                from mrl.collect.endpoint.agents import Agents  # few runs need a web server

                kwargs = recipe.data.chat_template_kwargs
                self.agents = Agents(recipe.environment, tokenizer, kwargs)
            elif recipe.environment is not None:
                self.environments = EnvironmentRunner(recipe.environment, budget, user)
            for key, reward in rewards.items():
                self._runners[key] = RewardRunner(reward, recipe.reward_timeout_s, budget, user)
            undo.pop_all()

    def begin_step(self) -> None:
        """Reset the groups and the failure counts for a new step."""
        self._begun, self._num_scored = [], 0
        for runner in self._runners.values():
            runner.begin_step()
        for played in (self.environments, self.agents):
            if played is not None:
                played.reset_counts()

    def episodes(self) -> GroupEnvironments | GroupAgents | None:
        """Return what runs the episodes of some groups, and counts their failures. Several such objects
        can be in use at the same time. Return None if the recipe has no environment."""
        if self.agents is not None:
            return GroupAgents(self.agents)
        return None if self.environments is None else GroupEnvironments(self.environments)

    def begin(self, group: SampleGroup) -> None:
        """Start to score a complete group, and return at once. A group that an environment has scored
        keeps its rewards."""
        runner = self._runner_of(group.prompt)
        if runner is None:
            self._begun.append((group, None))
            return
        (texts,) = completions([group], self._tokenizer)  # the group keeps them
        future = self._thread.submit(judged, runner, group, texts, step_samples=self._step_samples)
        self._begun.append((group, future))

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Wait for the rewards. Return the groups in the order of their ids, and the number of
        samples that could not be scored.

        Raises RunFailed if more than 5% of the step's samples could not be scored.
        """
        if self.agents is not None:
            self.agents.sweep()
        for group, rewards in self._begun:
            if rewards is not None:
                group.rewards = rewards.result()
                beat()
        groups = sorted((g for g, _ in self._begun), key=lambda group: group.samples[0].group_id)
        return groups, self._report_failures()

    def score(self, group: SampleGroup) -> tuple[SampleGroup, int]:
        """Score one group. Return the group and the number of samples that could not be scored.

        Any thread may call this. The group does not belong to a step yet, so failures are counted
        over consecutive groups that together have about as many samples as a step. Raises RunFailed
        if the failures are more than 5% of a step's samples.
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
        group.rewards = judged(runner, group, texts, step_samples=self._step_samples)
        return group, runner.report.num_failed - before

    def _runner_of(self, prompt: Prompt) -> RewardRunner | None:
        """Return the runner of the reward that scores a prompt; None if no reward function does.

        Raises RunFailed if the prompt's data source has a reward that the recipe does not have.
        """
        if prompt.reward is not None and prompt.reward not in self._runners:
            known = ", ".join(filter(None, self._runners)) or "none"
            raise RunFailed(
                f"{prompt.source}: the prompt has the reward {prompt.reward}, but the recipe's sources "
                f"have {known}; restore that reward, or start a new run"
            )
        return self._runners.get(prompt.reward)

    def close(self) -> None:
        """End the processes of the rewards and environments. May be called more than once."""
        for runner in self._runners.values():
            runner.close()
        for played in (self.environments, self.agents):
            if played is not None:
                played.close()
        self._thread.shutdown(cancel_futures=True)

    def _report_failures(self) -> int:
        """Print a warning about samples that could not be scored, and return their number."""
        if not self._begun:  # the counts are those of an earlier round, then
            return 0
        if (agents := self.agents) is not None:
            if agents.num_failed:
                console.warning(
                    f"{agents.what} failed in {agents.num_failed} episodes, which are masked: "
                    f"{agents.first_error}"
                )
            if agents.num_cut_off:
                console.warning(
                    f"{agents.what}: {agents.num_cut_off} episodes were cut off and are masked: "
                    f"{agents.first_cut_off}"
                )
            if num_branched := agents.take_branched():
                console.warning(
                    f"{agents.what}: {num_branched} episodes have several branches, because agents "
                    "rewrote earlier messages or held several conversations; only the longest of each "
                    "is trained, and all with rollout.endpoint_branches=tree. This is said once"
                )
            return agents.num_failed + self._report_rewards()
        if (environments := self.environments) is not None:
            if environments.num_failed:
                console.warning(
                    f"{environments.what} failed in {environments.num_failed} episodes, which are "
                    f"masked ({environments.num_replayed} others were played again): "
                    f"{environments.first_error}"
                )
            return environments.num_failed
        return self._report_rewards()

    def _report_rewards(self) -> int:
        """Print a warning about failures of reward functions, and return the number of samples."""
        reports = [runner.report for runner in self._runners.values()]
        for report in reports:
            if report.num_failed or report.num_repeated:
                console.warning(
                    f"the reward function failed on {report.num_repeated} groups, scored again one by "
                    f"one; {report.num_failed} samples masked: {report.first_error}"
                    + (f"; {shown_rows(report.rows)}" if report.rows else "")
                )
        return sum(report.num_failed for report in reports)
