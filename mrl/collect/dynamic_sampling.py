"""Dynamic sampling (DAPO, arXiv 2503.14476 section 3.2) replaces zero-variance groups.

A step draws prompts in rounds, each as many as are missing, until the rewards within each of its groups
differ or the rounds are used up. All ranks hold the same groups, so they draw the same rounds without
communication; prompts come from the run's cursor, which a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrl.algorithms.signal import has_signal, zero_variance_metrics
from mrl.collect.backlog import StepPrompts, fresh_prompts
from mrl.config import RolloutConfig
from mrl.types import Prompt, SampleGroup

ROUND_SHIFT = 56
"""A shift that keeps these seeds above those of steps, and of prompts drawn twice in a step."""


class DynamicSampling:
    """Gathers the groups of one step, round by round."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._kept: list[SampleGroup] = []
        self._zero_variance: list[SampleGroup] = []
        self.num_rounds = 0
        """Rounds whose groups were added."""

    @property
    def num_missing(self) -> int:
        """Groups that the step still needs."""
        return self._config.prompts_per_step - len(self._kept)

    @property
    def is_over(self) -> bool:
        """Whether all groups are there, or the rounds are used up."""
        return not self.num_missing or self.num_rounds >= self._config.dynamic_sampling_rounds

    def add(self, groups: Sequence[SampleGroup]) -> None:
        """Take in a round's scored groups."""
        self.num_rounds += 1
        for group in groups:
            assert group.rewards is not None
            (self._kept if has_signal(group.rewards) else self._zero_variance).append(group)

    def next_round(self, draw: Callable[[int], list[Prompt]], seed: int) -> StepPrompts:
        """Return as many further prompts as are missing; their groups' ids follow those before."""
        return fresh_prompts(
            draw(self.num_missing),
            self._config.samples_per_prompt,
            seed + (self.num_rounds << ROUND_SHIFT),
            first_id=len(self._kept) + len(self._zero_variance),
        )

    def result(self) -> list[SampleGroup]:
        """Return prompts_per_step groups in the order of their ids. Where too few have rewards that
        differ, the first zero-variance groups fill up; they are dropped from the loss."""
        chosen = [*self._kept, *self._zero_variance[: self.num_missing]]
        return sorted(chosen, key=lambda group: group.samples[0].group_id)

    def complaint(self) -> str:
        """Return a message about the groups that stayed missing."""
        return (
            f"{self.num_missing} of {self._config.prompts_per_step} groups have zero variance after "
            f"rollout.dynamic_sampling_rounds={self.num_rounds}; they are dropped from the loss"
        )

    def metrics(self) -> dict[str, float]:
        """Return rounds, prompts drawn, zero-variance groups by cause, groups that stayed missing, and
        the mean reward of all that was drawn: the mean over the step's groups leaves out extremes."""
        everything = [*self._kept, *self._zero_variance]
        rewards = [group.rewards for group in everything if group.rewards is not None]
        causes = zero_variance_metrics(rewards)
        known = [float(r) for group in rewards for r in group[~group.isnan()]]
        return {
            "dynamic_sampling/rounds": float(self.num_rounds),
            "dynamic_sampling/prompts_drawn": float(len(everything)),
            "dynamic_sampling/missing_groups": float(self.num_missing),
            "dynamic_sampling/reward_mean_drawn": sum(known) / max(len(known), 1),
            **{
                key.replace("reward/zero_signal", "dynamic_sampling/zero_signal"): value
                for key, value in causes.items()
            },
        }
