"""The interface through which a multi-turn rollout runs episodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from mrl.config import EnvironmentConfig
from mrl.environments.base import Observation, StepResult
from mrl.types import Prompt


@dataclass(frozen=True)
class EpisodeFailed:
    """The environment raised, hung, died or returned something invalid, so the episode is over."""

    reason: str


@dataclass(frozen=True)
class Start:
    """The prompt and the seed with which an episode begins."""

    prompt: Prompt
    seed: int


class Episodes(Protocol):
    """Runs all episodes of a step, or the episodes of one sample group while other groups run.

    Every method refers to an episode by its number.
    """

    config: EnvironmentConfig

    def reset(
        self, starts: Mapping[int, Start], *, step_samples: int
    ) -> dict[int, Observation | EpisodeFailed | None]:
        """Begin the episodes `starts`, and forget earlier episodes.

        `step_samples` is the number of samples in the step, over all engines. From now on,
        RunFailed is raised as soon as more than 5% of these samples have failed. Returns one value
        per episode: the first observation, None if the episode begins without an observation, or
        EpisodeFailed if it failed.
        """
        ...

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EpisodeFailed]:
        """Pass the policy's text to each episode in `actions`; return the result of each episode."""
        ...

    def end(self, numbers: Collection[int]) -> None:
        """End the unfinished episodes among `numbers`, and close their environments.

        Episodes that are done or have failed are ignored.
        """
        ...

    def count_failure(self, reason: str) -> None:
        """Count one more episode as failed. The caller has found the reason, which is not an error
        of the environment's code."""
        ...
