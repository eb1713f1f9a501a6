"""What plays episodes, as the rollout of conversations sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from mrl.config import EnvironmentConfig
from mrl.environments.base import Observation, StepResult
from mrl.types import Prompt


@dataclass(frozen=True)
class EpisodeFailed:
    """The environment raised, hung, died or answered nonsense; the episode is over."""

    reason: str


@dataclass(frozen=True)
class Start:
    """What an episode begins with: the arguments of reset."""

    prompt: Prompt
    seed: int


class Episodes(Protocol):
    """Plays the episodes of a step, or of one group beside others."""

    config: EnvironmentConfig

    def reset(
        self, starts: Mapping[int, Start], *, step_samples: int
    ) -> dict[int, Observation | EpisodeFailed | None]:
        """Begin these episodes; earlier ones are forgotten.

        `step_samples` counts those of the step over all engines: from now on, RunFailed is raised as
        soon as more than 5% of them failed.
        """
        ...

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EpisodeFailed]:
        """Give these episodes the policy's text."""
        ...

    def end(self, numbers: Collection[int]) -> None:
        """End these episodes and close their environments, which are not done.

        Passes by the ones that were done, or failed.
        """
        ...

    def count_failure(self, reason: str) -> None:
        """Count one more episode as failed, for a reason that was found elsewhere."""
        ...
