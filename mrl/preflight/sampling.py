"""Check the sampling parameters, the sampling mask, and the size of the engine's KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.config import Recipe, RolloutConfig
from mrl.engines.base import SamplingParams
from mrl.engines.sampling import check_sampling_params
from mrl.engines.sglang.limits import cache_len
from mrl.engines.sglang.settings import CPU_MAX_TOTAL_TOKENS
from mrl.errors import InputError
from mrl.types import Prompt

MASK_TOKENS = 4096
"""Largest number of token ids in the sampling mask that SGLang returns for a token, if
`rollout.server_args` does not set `sampling_mask_max_tokens`."""


def check_sampling(rollout: RolloutConfig, vocab_size: int, where: str = "rollout") -> None:
    """Raise InputError for sampling parameters of `rollout` that are impossible or contradictory.

    Stop strings together with `partial_rollouts: resume` are also refused. In the message, `where`
    is written before the name of the key.
    """
    exact = rollout.max_response_len if rollout.min_response_len else 0
    try:
        sampling = SamplingParams(
            rollout.max_response_len,
            exact,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            stop_token_ids=rollout.stop_token_ids,
            stop=rollout.stop,
        )
    except ValueError as error:
        raise InputError(f"{where}.{error}") from None
    check_sampling_params(sampling, vocab_size, f"{where}.", min_name="rollout.min_response_len")
    if rollout.stop and rollout.partial_rollouts == "resume":
        raise InputError(
            f"{where}.stop is given with rollout.partial_rollouts=resume: the engine looks for the "
            "text in the tokens of one request, and would miss one that begins before the sample is "
            "continued; use stop_token_ids, or partial_rollouts=drop or defer"
        )


def check_cache(
    recipe: Recipe,
    prompts: Sequence[Prompt],
    context_len: int,
    *,
    on_gpu: bool,
    where: str = "rollout",
) -> None:
    """Raise InputError if the engine's KV cache is too small for the largest request.

    The largest request is the longest of `prompts` with the longest response or, in an environment,
    a conversation that fills the context. `recipe` is the recipe of training or of an eval set.
    Nothing is checked if the size of the cache is not known before the engine starts; the engine
    then refuses a request that is too large. Nothing is checked with engines other than SGLang, or
    if rollouts are loaded instead of generated.
    """
    rollout = recipe.rollout
    if rollout.engine != "sglang" or recipe.debug.load_rollouts is not None:
        return
    holds = cache_len(rollout, on_gpu=on_gpu)
    if recipe.environment is None:
        prompt_len = max((prompt.token_ids.numel() for prompt in prompts), default=0)
        needed, what = prompt_len + rollout.max_response_len, "its longest prompt and answer have"
    else:
        needed, what = context_len, "a conversation has up to rollout.context_len ="
    if holds is not None and needed > holds:
        size = rollout.max_total_tokens or CPU_MAX_TOTAL_TOKENS
        raise InputError(
            f"{where}: {what} {needed} tokens, but the engine's KV cache of {size} "
            f"(rollout.max_total_tokens) holds {holds} of one request; set it to "
            f"{needed + size - holds}, or lower the lengths"
        )


def check_recipe_sampling(recipe: Recipe, vocab_size: int) -> None:
    """Raise InputError if the settings for the rollouts of training are invalid: the sampling
    parameters or the sampling mask.

    `mrl.preflight.data.eval_sets_of` checks the sampling parameters of the eval sets.
    """
    check_sampling(recipe.rollout, vocab_size)
    check_sampling_mask(recipe)


def check_sampling_mask(recipe: Recipe) -> None:
    """Raise InputError if `rollout.sampling_mask` is on and another setting does not work with it."""
    rollout = recipe.rollout
    if not rollout.sampling_mask:
        return
    given = rollout.server_args.get("sampling_mask_max_tokens")
    most = given if isinstance(given, int) else MASK_TOKENS  # `check_limits` refuses other types
    if not 2 <= rollout.top_k <= most:
        raise InputError(
            f"rollout.top_k is {rollout.top_k}, but rollout.sampling_mask needs 2 to {most}, which "
            "bounds the size of the mask that the engine returns; set it in addition to any top_p "
            "(a top_k of 512 removes almost no further tokens), or turn the mask off"
        )
    if rollout.true_on_policy:
        raise InputError(
            "rollout.true_on_policy is on, but with rollout.sampling_mask the engine computes "
            "log-probs in another way than the trainer, and their last bits differ; turn one of them "
            "off"
        )
    if not recipe.train.logprob_chunk_tokens:
        raise InputError(
            "train.logprob_chunk_tokens is 0, but rollout.sampling_mask computes log-probs in chunks; "
            "give it a number of tokens, such as 1024"
        )
