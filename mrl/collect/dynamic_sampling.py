"""Dynamic sampling (DAPO, arXiv 2503.14476 section 3.2) replaces zero-variance groups.

A step draws prompts in rounds. Each round replaces the groups whose rewards are all equal. The
rounds end when the rewards within every group differ, or after `rollout.dynamic_sampling_rounds`
rounds. All ranks have the same groups, so they draw the same prompts without communication. The
prompts are the next ones of the training data; the position in the data is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrl.algorithms.signal import has_signal, zero_variance_metrics
from mrl.collect.backlog import StepPrompts, fresh_prompts
from mrl.config import RolloutConfig
from mrl.types import Prompt, SampleGroup

ROUND_SHIFT = 56
"""The number of earlier rounds, shifted left by this many bits, is added to a round's seed. The
seed thus differs from the seeds of all steps, and from the seeds of prompts that a step draws
twice."""


class DynamicSampling:
    """Gathers the groups of one step over its rounds."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._kept: list[SampleGroup] = []
        self._zero_variance: list[SampleGroup] = []
        self.num_rounds = 0
        """Number of rounds whose groups were added."""

    @property
    def num_missing(self) -> int:
        """Number of groups with differing rewards that the step still needs."""
        return self._config.prompts_per_step - len(self._kept)

    @property
    def is_over(self) -> bool:
        """Whether no group is missing, or the maximum number of rounds is reached."""
        return not self.num_missing or self.num_rounds >= self._config.dynamic_sampling_rounds

    def add(self, groups: Sequence[SampleGroup]) -> None:
        """Add the scored groups of a round."""
        self.num_rounds += 1
        for group in groups:
            assert group.rewards is not None
            (self._kept if has_signal(group.rewards) else self._zero_variance).append(group)

    def next_round(self, draw: Callable[[int], list[Prompt]], seed: int) -> StepPrompts:
        """Return one new prompt for each missing group. The group ids continue those of earlier
        rounds."""
        return fresh_prompts(
            draw(self.num_missing),
            self._config.samples_per_prompt,
            seed + (self.num_rounds << ROUND_SHIFT),
            first_id=len(self._kept) + len(self._zero_variance),
        )

    def result(self) -> list[SampleGroup]:
        """Return `prompts_per_step` groups in the order of their ids.

        If groups are missing, the first zero-variance groups take their place. Zero-variance groups
        do not contribute to the loss.
        """
        chosen = [*self._kept, *self._zero_variance[: self.num_missing]]
        return sorted(chosen, key=lambda group: group.samples[0].group_id)

    def complaint(self) -> str:
        """Return a message about the groups that are still missing after the last round."""
        return (
            f"{self.num_missing} of {self._config.prompts_per_step} groups have zero variance after "
            f"rollout.dynamic_sampling_rounds={self.num_rounds}; they are dropped from the loss"
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers of rounds, drawn prompts and missing groups, the number of
        zero-variance groups by cause (`mrl.algorithms.signal`), and the mean reward over all drawn
        prompts. A mean over only the step's groups would be biased, because zero-variance groups
        were replaced."""
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
