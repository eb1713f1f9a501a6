"""This module checks what cuts the distribution that samples come from, and what ends them."""

from __future__ import annotations

from mrl.config import RolloutConfig
from mrl.errors import InputError
from mrl.rollout.base import SamplingParams


def check_sampling(rollout: RolloutConfig, vocab_size: int, where: str = "rollout") -> None:
    """Raise InputError where `top_k`, `stop` or `stop_token_ids` cannot be what is meant.

    `where` is the branch of the recipe that has them, for the message.
    """
    try:
        SamplingParams(1, top_k=rollout.top_k, stop=rollout.stop)
    except ValueError as error:
        raise InputError(f"{where}.{error}") from None
    if rollout.top_k > vocab_size:
        raise InputError(
            f"{where}.top_k is {rollout.top_k}, but the model has only {vocab_size} tokens; give "
            "fewer, or -1 for all"
        )
    for token in rollout.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{where}.stop_token_ids has {token}, expected 0 to {vocab_size - 1}: the model has "
                f"{vocab_size} tokens"
            )
    ends = [name for name in ("stop", "stop_token_ids") if getattr(rollout, name)]
    if ends and rollout.min_response_len:
        raise InputError(
            f"{where}.{ends[0]} is given with rollout.min_response_len {rollout.min_response_len}, "
            "which asks for completions of one exact length; leave one of them out"
        )
    if rollout.stop and rollout.partial_rollouts == "resume":
        raise InputError(
            f"{where}.stop is given with rollout.partial_rollouts=resume: the engine looks for the "
            "text in the tokens of one request, and would miss one that begins before the sample is "
            "continued; use stop_token_ids, or partial_rollouts=drop or defer"
        )
