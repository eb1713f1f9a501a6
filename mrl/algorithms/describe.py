"""Describe the algorithm of a recipe in one line: its name, its importance weights and masks, and the
published methods to which they correspond."""

from __future__ import annotations

from mrl.algorithms.base import or_default
from mrl.algorithms.corrections import IMPORTANCE_RANGES, mask_range
from mrl.config import AlgorithmConfig

ICEPOP = "IcePop, arXiv 2510.18855"
DPPO = "DPPO, arXiv 2602.04879: binary TV, the ratio against the engine's log-probs"
RSPO = "RSPO's, arXiv 2510.23027"
DPPO_BOUND = 20.0
"""Upper bound of the importance ratio in verl's recipe for DPPO."""


def describe(config: AlgorithmConfig) -> str:
    """Return a line that describes the algorithm, for the output of `mrl check`: its name, then its
    importance weights and masks, then remarks, separated by commas."""
    parts = [config.name]
    if config.importance != "none":
        low, high = IMPORTANCE_RANGES[config.importance, config.importance_level]
        low, high = or_default(config.importance_low, low), or_default(config.importance_high, high)
        is_icepop = (config.importance, config.importance_level) == ("mis", "token")
        parts.append(
            f"{config.importance} of each {config.importance_level} in [{low:g}, {high:g}]"
            + f" ({ICEPOP})" * is_icepop
        )
    for mask in config.masks:
        low, high = mask_range(mask)
        parts.append(f"{mask.name} above {high:g}" if mask.name == "opsm"
                     else f"{mask.name} {low:g} / {high:g}")  # fmt: skip
    if config.router_shift_floor is not None:
        parts.append(f"router-shift weights of at least {config.router_shift_floor:g} ({RSPO})")
    if is_published_dppo(config):
        parts.append(f"together {DPPO}")
    if config.turn_rewards:
        parts.append("rewards credited to their turns")
    elif config.name == "gspo_token":
        parts.append("every token has its sample's advantage, so it trains as gspo does")
    return ", ".join(parts)


def is_published_dppo(config: AlgorithmConfig) -> bool:
    """Return whether `config` is DPPO as published: CISPO's loss, token-level TIS weights, and
    DPPO's mask as the only mask.

    DPPO bounds the ratio between a token's probabilities under the current policy and in the
    engine. Here this ratio is the product of the policy ratio (current to old policy) and the
    importance weight (old policy to engine). The upper bound of each factor must be DPPO_BOUND.
    """
    low, high = config.importance_low, config.importance_high
    return (
        (config.name, config.importance, config.importance_level) == ("cispo", "tis", "token")
        and [mask.name for mask in config.masks] == ["dppo"]
        and (config.clip_low, config.clip_high) in ((None, DPPO_BOUND - 1), (1.0, DPPO_BOUND - 1))
        and (low or 0.0, high) == (0.0, DPPO_BOUND)
    )
