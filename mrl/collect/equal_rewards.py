"""Warns about steps whose rewards have no learning signal.

If the samples of each prompt have equal rewards, algorithms that compare them have only advantages
of 0, and the run goes on without learning, for example with a reward that never matches an answer.
Algorithms that compare the samples of the complete step, such as REINFORCE++, have only advantages of 0
if all samples of the step have equal rewards. With `algorithm.overlong_buffer_len`, the rewards that
are compared include the penalty for long answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mrl.algorithms.base import Algorithm, traits
from mrl.algorithms.dapo import shaped_rewards
from mrl.algorithms.signal import has_signal
from mrl.config import AlgorithmConfig
from mrl.types import SampleGroup

FIRST = 2
"""After so many such steps in a row comes the first warning. Each further one comes after ten times
as many."""


class EqualRewards:
    """Counts consecutive steps without an advantage."""

    def __init__(
        self,
        algorithm: Algorithm,
        config: AlgorithmConfig,
        max_response_len: int,
        warn: Callable[[str], None],
    ) -> None:
        self._algorithm, self._config, self._warn = algorithm, config, warn
        self._max_response_len = max_response_len
        self._in_a_row, self._next = 0, FIRST

    def look(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Count step `step` with its `groups`, which have rewards, and warn if that is due."""
        scored = [group for group in groups if group.rewards is not None]
        if not scored or self._have_advantage(scored):
            self._in_a_row, self._next = 0, FIRST
            return
        self._in_a_row += 1
        if self._in_a_row < self._next:
            return
        self._next *= 10
        known = torch.cat([group.rewards for group in scored if group.rewards is not None])
        known = known[~known.isnan()]
        if not len(known):
            what = "no sample had a reward"
        elif known.min() == known.max():
            what = f"all samples had the reward {float(known.min()):.4g}"
        else:
            what = "the samples of each prompt had equal rewards"
        self._warn(
            f"steps {step - self._in_a_row + 1} to {step}: {what}, so nothing was learned from them; "
            "look at these samples in rollouts/. What helps: a reward that also tells wrong answers "
            "apart, prompts of another difficulty, or a larger rollout.samples_per_prompt"
        )

    def _have_advantage(self, groups: Sequence[SampleGroup]) -> bool:
        """Return whether an advantage of the scored `groups` may differ from 0."""
        of_algorithm = traits(self._algorithm)
        has_penalty = self._config.kl_in == "reward" and self._config.kl_coef > 0
        if has_penalty or self._config.turn_rewards or of_algorithm.needs_critic:
            return True
        if self._config.dynamic_sampling:  # it drops the groups that are equal without the penalty
            groups = [e for e in groups if e.rewards is not None and has_signal(e.rewards)]
        rewards = [shaped_rewards(each, self._config, self._max_response_len) for each in groups]
        if any(map(has_signal, rewards)):
            return True
        if not rewards:
            return False
        found = torch.cat(self._algorithm.advantages(list(rewards), self._config))
        # Samples without a reward are not in the loss. Whitening subtracts the mean of the others.
        known = found[~torch.cat(list(rewards)).isnan()]
        return has_signal(known) if of_algorithm.whitens else bool(known.any())
