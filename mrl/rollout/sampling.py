"""Checks sampling parameters against a model before a request is sent.

Recipes, evaluation sets, a session's `sample` and every request are checked by the same function.
Parameters that SGLang's scheduler cannot handle crash it, and fail the requests of all other callers.
"""

from __future__ import annotations

from mrl.errors import InputError
from mrl.rollout.base import SamplingParams

LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-6, 1e6
"""SGLang silently treats a smaller temperature as 0. Logits divided by far more than the largest one
are all equal, and from 1e30 on the kernel of `rollout.batch_invariant` raises."""


def check_sampling_params(
    sampling: SamplingParams,
    vocab_size: int,
    where: str = "",
    *,
    min_name: str = "min_new_tokens",
) -> None:
    """Raise InputError if a model of `vocab_size` tokens cannot be sampled with these parameters.

    `where` is a prefix for the parameter's name in the message; `min_name` is the user's name for
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
    """Raise InputError for a temperature that no engine samples at."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        raise InputError(
            f"{where}temperature is {temperature:g}, expected {LEAST_TEMPERATURE:g} to "
            f"{LARGEST_TEMPERATURE:g}, or 0 for greedy sampling"
        )
