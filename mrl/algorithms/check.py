"""Checks of a recipe's `algorithm` section that need neither a model nor data."""

from __future__ import annotations

from typing import Literal

from mrl.algorithms.base import Traits
from mrl.algorithms.corrections import MASK_RANGES
from mrl.algorithms.gae import PPO
from mrl.config import AlgorithmConfig, MaskConfig
from mrl.errors import InputError

_NOT_FOR_ALL = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "router_shift_floor",
    "tau_positive",
    "tau_negative",
    "gamma",
    "lam",
    "lam_alpha",
    "lam_critic",
    "whiten",
    "value_clip",
    "nll_coef",
    "proximal_at_no_lag",
    "bootstrap_truncated",
    "turn_rewards",
    "min_group_std",
    "advantage_eps",
)
"""Fields of AlgorithmConfig that not every algorithm reads. If an algorithm has the attribute
`READS`, a field that is not in `READS` must keep its default."""


def check_algorithm(config: AlgorithmConfig, traits: Traits) -> None:
    """Raise InputError if the algorithm does not read an option that is set, or if an option is out
    of range or contradicts another option."""
    defaults = AlgorithmConfig()
    for name in _NOT_FOR_ALL:
        value = getattr(config, name)
        if traits.reads is None or name in traits.reads or value == getattr(defaults, name):
            continue
        raise InputError(
            f"algorithm.{name} is {value}, but {config.name} does not read it; leave it out, or "
            "choose an algorithm that does (docs/algorithms.md)"
        )
    check_dual_clip(config, traits.clip_high)
    _check_kl(config, defaults)
    _check_lambda(config, defaults, None if traits.replaces_gae else PPO.policy)
    for mask in config.masks:
        _check_mask(mask)
    names = [mask.name for mask in config.masks]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"algorithm.masks: got {name} twice, expected each name once")


def check_dual_clip(config: AlgorithmConfig, published_high: float | None) -> None:
    """Raise InputError if `config.dual_clip` is set but not above `1 + clip_high`.

    If `config.clip_high` is None, `published_high` takes its place. If both are None, nothing is
    checked.
    """
    high = published_high if config.clip_high is None else config.clip_high
    if config.dual_clip is None or high is None or config.dual_clip > 1 + high:
        return
    whose = "" if config.clip_high is not None else f" (the published clip_high of {config.name})"
    raise InputError(
        f"algorithm.dual_clip is {config.dual_clip:g}, expected above 1 + clip_high = {1 + high:g}"
        f"{whose}; 3 is usual (arXiv 1912.09729)"
    )


def _check_kl(config: AlgorithmConfig, defaults: AlgorithmConfig) -> None:
    if not config.kl_coef:
        for name in ("kl_in", "kl_estimator", "kl_target", "kl_horizon"):
            value = getattr(config, name)
            if value != getattr(defaults, name):
                raise InputError(
                    f"algorithm.{name} is {value}, but algorithm.kl_coef is 0; set kl_coef "
                    f"above 0, or leave {name} out"
                )
    if config.kl_target is None and config.kl_horizon != defaults.kl_horizon:
        raise InputError(
            f"algorithm.kl_horizon is {config.kl_horizon}, but algorithm.kl_target is not given, so "
            "kl_coef stays as it is; give a target, or leave kl_horizon out"
        )
    if config.kl_in == "reward" and config.kl_estimator not in ("k1", "k2", "k3"):
        raise InputError(
            f"algorithm.kl_estimator is {config.kl_estimator}, which changes only the gradient, and "
            "a reward has none; with kl_in reward choose k1, k2 or k3"
        )


def _check_lambda(
    config: AlgorithmConfig,
    defaults: AlgorithmConfig,
    published: float | Literal["adaptive"] | None,
) -> None:
    """Raise InputError if `lam` is outside of [0, 1], or if `lam_alpha` is set although the lambda
    is not adaptive.

    published: the lambda that the algorithm uses if `config.lam` is None; None if it is unknown.
    """
    if isinstance(config.lam, float) and not 0 <= config.lam <= 1:
        raise InputError(f"algorithm.lam is {config.lam:g}, expected 0 to 1, or adaptive")
    lam = published if config.lam is None else config.lam
    if isinstance(lam, float) and config.lam_alpha != defaults.lam_alpha:
        whose = "" if config.lam is not None else f" (the published lam of {config.name})"
        raise InputError(
            f"algorithm.lam_alpha is {config.lam_alpha:g}, but lam is {lam:g}{whose}; set lam to "
            "adaptive, or leave lam_alpha out"
        )


def _check_mask(mask: MaskConfig) -> None:
    name = f"algorithm.masks: {mask.name}"
    if mask.name == "opsm":
        if mask.high is None or mask.low is not None:
            raise InputError(
                f"{name}: got low {mask.low}, high {mask.high}, expected high alone, the largest mean "
                "of rollout - logp; no value is published, slime's is 1e-4 and TRL suggests 0.5"
            )
        return
    low, high = MASK_RANGES[mask.name]
    low = low if mask.low is None else mask.low
    high = high if mask.high is None else mask.high
    if mask.name == "dppo" and not (low <= 1 and high <= 1):
        raise InputError(f"{name}: got low {low:g}, high {high:g}, expected at most 1 each")
    if mask.name != "dppo" and not low <= 1 <= high:
        raise InputError(
            f"{name}: got the range [{low:g}, {high:g}], expected a range that contains 1"
        )
