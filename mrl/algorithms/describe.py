"""Names what a recipe's `algorithm` is: its corrections, and which published method they are."""

from __future__ import annotations

from mrl.algorithms.base import either
from mrl.algorithms.corrections import IMPORTANCE_RANGES, mask_range
from mrl.config import AlgorithmConfig

ICEPOP = "IcePop, arXiv 2510.18855"
DPPO = "DPPO, arXiv 2602.04879: binary TV, the ratio against the engine's log-probs"
DPPO_BOUND = 20.0
"""The bound of DPPO's ratio in verl's recipe."""


def describe(config: AlgorithmConfig) -> str:
    """Return the algorithm in one line, for `mrl check`: its name, then corrections and remarks."""
    parts = [config.name]
    if config.importance != "none":
        low, high = IMPORTANCE_RANGES[config.importance, config.importance_level]
        low, high = either(config.importance_low, low), either(config.importance_high, high)
        is_icepop = (config.importance, config.importance_level) == ("mis", "token")
        parts.append(
            f"{config.importance} of each {config.importance_level} in [{low:g}, {high:g}]"
            + f" ({ICEPOP})" * is_icepop
        )
    for mask in config.masks:
        low, high = mask_range(mask)
        parts.append(f"{mask.name} above {high:g}" if mask.name == "opsm"
                     else f"{mask.name} {low:g} / {high:g}")  # fmt: skip
    if is_published_dppo(config):
        parts.append(f"together {DPPO}")
    if config.turn_rewards:
        parts.append("rewards at their turns")
    elif config.name == "gspo_token":
        parts.append("every token has its sample's advantage, so it trains as gspo does")
    return ", ".join(parts)


def is_published_dppo(config: AlgorithmConfig) -> bool:
    """Return whether this is CISPO's form with the ratio exp(logp - rollout), and DPPO's mask alone.

    The two factors of the ratio, exp(logp - old) and exp(old - rollout), have DPPO_BOUND each.
    """
    low, high = config.importance_low, config.importance_high
    return (
        (config.name, config.importance, config.importance_level) == ("cispo", "tis", "token")
        and [mask.name for mask in config.masks] == ["dppo"]
        and (config.clip_low, config.clip_high) in ((None, DPPO_BOUND - 1), (1.0, DPPO_BOUND - 1))
        and (low or 0.0, high) == (0.0, DPPO_BOUND)
    )
