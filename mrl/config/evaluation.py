"""Configuration of evaluations: when the policy is evaluated, and on which sets of prompts."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from mrl.config.branch import Branch, one_or_several
from mrl.config.data import RowsConfig
from mrl.config.reward import Rewards


class EvalSetConfig(RowsConfig):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the set in the metrics, `eval/NAME/...`."""
    reward: Rewards | None = None
    """The reward for the samples, like the recipe's `reward`; null takes the recipe's reward or
    environment. The set is then played without the environment, unless that is `environment.mcp`."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Number k of samples for each prompt. The metrics are avg@k, and pass@j for j = 1, 2, 4 ... below
    k and for k itself."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Number of rows to evaluate, from the first row; null takes all rows."""
    max_response_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of a response; null takes rollout.max_response_len."""
    temperature: float | None = Field(default=None, ge=0)
    """The sampling temperature. Null takes rollout.temperature; 0 always takes the most likely
    token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling: the probability mass that is kept; null takes rollout.top_p."""
    top_k: int | None = None
    """Number of most likely tokens from which each token is sampled; -1 means all tokens, null
    takes rollout.top_k."""
    stop: tuple[str, ...] | None = None
    """Strings that end a response; null takes rollout.stop, and [] means no strings."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a response, in addition to the model's end-of-sequence tokens; null takes
    rollout.stop_token_ids."""
    pass_threshold: float = 1.0
    """A sample passes if its reward is at least this value."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_text(cls, value: Any) -> Any:
        return one_or_several(value)


class EvalConfig(Branch):
    every: int = Field(default=0, ge=0)
    """Number of steps between evaluations during training. With N, the policy is evaluated before
    steps 0, N, 2N ... and after the last step. With 0, only `mrl eval` evaluates."""
    sets: tuple[EvalSetConfig, ...] = ()
    """Sets of prompts, each with its own name; see docs/evaluation.md."""
