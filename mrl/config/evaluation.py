"""Configures what the policy is evaluated on."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from mrl.config.branch import Branch, one_or_several
from mrl.config.data import RowsConfig
from mrl.config.reward import Rewards


class EvalSetConfig(RowsConfig):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Its name in the metrics, `eval/NAME/...`."""
    reward: Rewards | None = None
    """What scores the samples, as the recipe's `reward`; null takes the recipe's reward or
    environment."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """The k of avg@k; pass@k is reported for 1, 2, 4 ... up to k."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Evaluate the first so many rows; null takes all."""
    max_response_len: int | None = Field(default=None, ge=1)
    """Tokens of a response at most; null takes rollout.max_response_len."""
    temperature: float | None = Field(default=None, ge=0)
    """The sampling temperature; null takes rollout.temperature, 0 the likeliest token each time."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Share of the distribution that is sampled from; null takes rollout.top_p."""
    top_k: int | None = None
    """Number of the likeliest tokens that are sampled from, -1 for all; null takes rollout.top_k."""
    stop: tuple[str, ...] | None = None
    """Texts that end a response; null takes rollout.stop, [] none."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response beside the model's own; null takes rollout.stop_token_ids."""
    pass_threshold: float = 1.0
    """A sample passes with a reward of at least this."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return one_or_several(value)


class EvalConfig(Branch):
    every: int = Field(default=0, ge=0)
    """Steps between evaluations during training: before step 0, N, 2N ... and after the last one. 0
    evaluates only by `mrl eval`."""
    sets: tuple[EvalSetConfig, ...] = ()
    """Sets of prompts, each with a name of its own; see docs/evaluation.md."""
