"""What a rollout exchanges with the environments of its episodes."""

from __future__ import annotations

from dataclasses import dataclass

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
