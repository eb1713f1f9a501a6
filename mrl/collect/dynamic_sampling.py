"""Dynamic sampling (DAPO, arXiv 2503.14476 section 3.2): groups without a signal are replaced.

A step draws prompts in rounds, each as many as are missing, until all its groups have rewards that
differ or the rounds are used up. All ranks hold the same groups, so they plan the same rounds without a
word; what is drawn comes off the run's cursor, which a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrl.algorithms.signal import has_signal, zero_signal_metrics
from mrl.collect.backlog import StepPlan, fresh_plan
from mrl.config import RolloutConfig
from mrl.types import Prompt, SampleGroup

ROUND_SHIFT = 56
"""Above the seeds of steps and of prompts that are drawn twice in one."""


class SignalRounds:
    """The groups of one step, round by round."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._kept: list[SampleGroup] = []
        self._flat: list[SampleGroup] = []
        self._num_rounds = 0

    @property
    def num_missing(self) -> int:
        return self._config.prompts_per_step - len(self._kept)

    @property
    def is_over(self) -> bool:
        return not self.num_missing or self._num_rounds >= self._config.dynamic_sampling_rounds

    def add(self, groups: Sequence[SampleGroup]) -> None:
        """Take in a round's scored groups."""
        self._num_rounds += 1
        for group in groups:
            assert group.rewards is not None
            (self._kept if has_signal(group.rewards) else self._flat).append(group)

    def next_round(self, draw: Callable[[int], list[Prompt]], seed: int) -> StepPlan:
        """As many further prompts as are missing; their groups' ids go on from those before."""
        return fresh_plan(
            draw(self.num_missing),
            self._config.samples_per_prompt,
            seed + (self._num_rounds << ROUND_SHIFT),
            first_id=len(self._kept) + len(self._flat),
        )

    def result(self) -> list[SampleGroup]:
        """prompts_per_step groups in the order of their ids: those with a signal, and where they are
        too few the first of the others, which leave the loss (`mrl.learn.shaping`)."""
        chosen = [*self._kept, *self._flat[: self.num_missing]]
        return sorted(chosen, key=lambda group: group.samples[0].group_id)

    def complaint(self) -> str:
        """Of groups that stayed missing, in words."""
        return (
            f"{self.num_missing} of {self._config.prompts_per_step} groups have no signal after "
            f"rollout.dynamic_sampling_rounds={self._num_rounds}; they leave the loss"
        )

    def metrics(self) -> dict[str, float]:
        """Rounds, prompts drawn, groups without a signal by cause, groups that stayed missing, and the
        mean reward of all that was drawn: that of the step's own groups leaves out the extremes."""
        everything = [*self._kept, *self._flat]
        rewards = [group.rewards for group in everything if group.rewards is not None]
        causes = zero_signal_metrics(rewards)
        known = [float(r) for group in rewards for r in group[~group.isnan()]]
        return {
            "dynamic_sampling/rounds": float(self._num_rounds),
            "dynamic_sampling/prompts_drawn": float(len(everything)),
            "dynamic_sampling/missing_groups": float(self.num_missing),
            "dynamic_sampling/reward_mean_drawn": sum(known) / max(len(known), 1),
            **{
                key.replace("reward/zero_signal", "dynamic_sampling/zero_signal"): value
                for key, value in causes.items()
            },
        }
