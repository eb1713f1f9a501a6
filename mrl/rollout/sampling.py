"""What of a request's sampling no engine can do for a model, found before the request is sent.

A recipe, an evaluation set and a session's `sample` are checked by the one function here, and so is
every request on its way to an engine. A scheduler that is given what it cannot compute with ends, and
with it the requests of everybody else.
"""

from __future__ import annotations

from mrl.errors import InputError
from mrl.rollout.base import SamplingParams

LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-6, 1e6
"""SGLang takes what is below the first for 0, without a word. Logits divided by far more than the
second are all the same, and from 1e30 on the kernel of `rollout.batch_invariant` raises there."""


def check_sampling_params(
    sampling: SamplingParams,
    vocab_size: int,
    where: str = "",
    *,
    min_name: str = "min_new_tokens",
) -> None:
    """Raise InputError where a model of `vocab_size` tokens cannot be sampled like this.

    `where` stands before the name of what is wrong; `min_name` is what the caller's user calls
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
            f"{where}stop is given with {min_name} {least}: a text ends a completion wherever it "
            "comes, before that too; leave one of them out"
        )
    if 2 * len(set(sampling.stop_token_ids)) > vocab_size:
        raise InputError(
            f"{where}stop_token_ids has {len(set(sampling.stop_token_ids))} of the model's "
            f"{vocab_size} tokens, and {min_name} {least} forbids them until then; give at most half "
            f"of the tokens, or leave {min_name} out"
        )


def check_temperature(temperature: float, where: str = "") -> None:
    """Raise InputError for a temperature that no engine samples at."""
    if temperature and not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        raise InputError(
            f"{where}temperature is {temperature:g}, expected {LEAST_TEMPERATURE:g} to "
            f"{LARGEST_TEMPERATURE:g}, or 0 for the likeliest token"
        )
