"""Check `algorithm.old_logprobs: rollout`, which uses the engine's log-probs for the old policy."""

from __future__ import annotations

from mrl.algorithms.base import Algorithm, or_default, traits
from mrl.config import AlgorithmConfig
from mrl.errors import InputError

USUAL_GAP = 1e-3
"""Typical difference between the trainer's and the engine's log-probs in bfloat16, averaged over
the tokens of a sequence."""
WITHOUT_EFFECT = ("token_mask", "sequence_mask")
"""Names of masks that depend on `exp(old_logprobs - rollout_logprobs)`. If the engine's log-probs
are used as the old log-probs, this ratio is always 1, so these masks have no effect."""


def check_old_logprobs(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    """Raise InputError if `algorithm.old_logprobs: rollout` contradicts other settings.

    Nothing is checked with `algorithm.old_logprobs: trainer`.
    """
    if config.old_logprobs == "trainer":
        return
    start = "algorithm.old_logprobs is rollout, but"
    known = traits(algorithm)
    if known.corrects_rollout or not known.needs_old_logprobs:
        raise InputError(
            f"{start} {config.name} has a proximal policy of its own; leave it at trainer"
        )
    if known.sequence_range is not None:
        low, high = known.sequence_range
        clip = min(or_default(config.clip_low, low), or_default(config.clip_high, high))
        if clip < 10 * USUAL_GAP:
            raise InputError(
                f"{start} {config.name} clips the mean of logp - old over a sequence at {clip:g}: "
                f"between trainer and engine that mean is about {USUAL_GAP:g} in bfloat16, "
                f"{USUAL_GAP / clip:.1f} times the range, so sequences would clip before the policy "
                "has learned anything; leave it at trainer and correct the gap with "
                f"algorithm.importance=tis, or give clip_low and clip_high {10 * USUAL_GAP:g} or more"
            )
    if config.importance != "none":
        raise InputError(
            f"{start} algorithm.importance is {config.importance}, which weighs by exp(old - rollout), "
            "and that would always be 1; leave one of them out"
        )
    for mask in config.masks:
        if mask.name in WITHOUT_EFFECT:
            raise InputError(
                f"{start} algorithm.masks has {mask.name}, which masks by exp(old - rollout), and that "
                "would always be 1; leave one of them out"
            )
    if config.kl_coef and config.kl_in == "reward":
        raise InputError(
            f"{start} algorithm.kl_in is reward, which needs the trainer's own log-probs before the "
            "update; leave it at trainer, or set kl_in=loss"
        )
