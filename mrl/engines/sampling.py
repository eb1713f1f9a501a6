"""Sampling parameters, and the check that they suit a model before a request is sent.

Recipes, evaluation sets, a session's `sample` and every request are checked by the same function.
Parameters that SGLang's scheduler cannot handle crash it, and then the requests of all other callers
fail as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrl.config import RolloutConfig
from mrl.errors import InputError

MAX_STOP_STRINGS = 32
"""SGLang's limit on the stop texts per request (sampling/sampling_params.py, MAX_STOP_COUNT)."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled; `temperature=0` is greedy."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """A completion has at least this many tokens. If equal to max_new_tokens, every completion has
    exactly this length."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Sample from this many of the most likely tokens; -1 is all."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that stop a completion, in addition to the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """Texts that stop a completion. The token that completes such a text is the completion's last
    token."""
    sampling_mask: bool = False
    """Whether each token of a completion comes with the set of tokens that `top_p` and `top_k` kept.
    The token's log-prob is then normalized over this set."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: expected 0 to max_new_tokens ({self.max_new_tokens}), got "
                f"{self.min_new_tokens}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, or -1 for all, got {self.top_k}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop: expected at most {MAX_STOP_STRINGS}, got {len(self.stop)}")
        if "" in self.stop:
            raise ValueError("stop: got an empty text, which stops before anything is generated")

    def at_most(self, num_tokens: int) -> SamplingParams:
        """Return these parameters for completions of at most `num_tokens` tokens, which must be at
        least 1.

        If completions are shortened to `min_new_tokens` or less, that lower bound is reduced: to
        `num_tokens`, or to one less if anything stops completions, because the engine refuses stops for
        completions of one exact length.
        """
        if num_tokens >= self.max_new_tokens:
            return self
        least = num_tokens - bool(self.stop or self.stop_token_ids)
        return replace(
            self, max_new_tokens=num_tokens, min_new_tokens=min(self.min_new_tokens, least)
        )


def sampling_of(config: RolloutConfig) -> SamplingParams:
    """Return the sampling parameters of a recipe."""
    return SamplingParams(
        max_new_tokens=config.max_response_len,
        min_new_tokens=config.min_response_len,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=config.stop_token_ids,
        stop=config.stop,
        sampling_mask=config.sampling_mask,
    )


LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-6, 1e6
"""Bounds of a temperature other than 0. SGLang silently treats a temperature below the lower bound as
0. At a temperature far above the upper bound all scaled logits are equal, and from 1e30 on, the kernel
of `rollout.batch_invariant` raises an error."""


def check_sampling_params(
    sampling: SamplingParams,
    vocab_size: int,
    where: str = "",
    *,
    min_name: str = "min_new_tokens",
) -> None:
    """Raise InputError if a model of `vocab_size` tokens cannot be sampled with these parameters.

    In the message, `where` is put before the parameter's name, and `min_name` is the user's name for
    `min_new_tokens`.
    """
    check_temperature(sampling.temperature, where)
    if sampling.top_k > vocab_size:
        raise InputError(
            f"{where}top_k is {sampling.top_k}, but the model has only {vocab_size} tokens; give "
            "fewer, or -1 for all"
        )
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{where}stop_token_ids has {token}, expected 0 to {vocab_size - 1}: the model has "
                f"{vocab_size} tokens"
            )
    least = sampling.min_new_tokens
    if not least:
        return
    ends = [name for name in ("stop", "stop_token_ids") if getattr(sampling, name)]
    if ends and least == sampling.max_new_tokens:
        raise InputError(
            f"{where}{ends[0]} is given with {min_name} {least}, which asks for completions of one "
            "exact length; leave one of them out"
        )
    if sampling.stop:
        raise InputError(
            f"{where}stop is given with {min_name} {least}: a stop text ends a completion wherever it "
            "occurs, also before that length; leave one of them out"
        )
    if 2 * len(set(sampling.stop_token_ids)) > vocab_size:
        raise InputError(
            f"{where}stop_token_ids has {len(set(sampling.stop_token_ids))} of the model's "
            f"{vocab_size} tokens, and {min_name} {least} forbids them up to that length; give at most "
            f"half of the tokens, or leave {min_name} out"
        )


def check_temperature(temperature: float, where: str = "") -> None:
    """Raise InputError for a temperature at which no engine can sample. In the message, `where` is put
    before the parameter's name."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        raise InputError(
            f"{where}temperature is {temperature:g}, expected {LEAST_TEMPERATURE:g} to "
            f"{LARGEST_TEMPERATURE:g}, or 0 for greedy sampling"
        )
