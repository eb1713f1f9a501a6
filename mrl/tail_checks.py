"""What a recipe may ask for against long tails: a part of mrl/preflight.py."""

from __future__ import annotations

from mrl.algorithms.base import importance_weight
from mrl.config import AlgorithmConfig, Recipe, RolloutConfig
from mrl.errors import InputError


def check_importance(algorithm: AlgorithmConfig) -> None:
    """Raise InputError for a range without a weight, and for one that holds nothing."""
    for name in ("importance_low", "importance_high"):
        value = getattr(algorithm, name)
        if value is not None and algorithm.importance == "none":
            raise InputError(
                f"algorithm.{name} is {value}, but algorithm.importance is none; choose tis or mis, or "
                "leave the range out"
            )
    try:
        importance_weight(algorithm)
    except ValueError as error:
        raise InputError(f"algorithm.{error}") from None


def check_unfinished(recipe: Recipe) -> None:
    """Raise InputError where nothing can be unfinished, or could not be trained on afterwards."""
    rollout = recipe.rollout
    if recipe.environment is not None and rollout.over_sampling != 1:
        raise InputError(
            f"rollout.over_sampling is {rollout.over_sampling:g}, but the episodes of an environment "
            "advance turn by turn together: none is slow alone; set it to 1"
        )
    if rollout.unfinished != "drop" and rollout.over_sampling == 1:
        raise InputError(
            f"rollout.unfinished is {rollout.unfinished}, but with rollout.over_sampling 1.0 every "
            "prompt finishes; start more than a step needs (e.g. 1.5), or leave it at drop"
        )
    if rollout.unfinished == "resume" and recipe.algorithm.importance == "none":
        raise InputError(
            "rollout.unfinished is resume, but algorithm.importance is none: tokens of older weights "
            "would count as if the present ones had sampled them; set algorithm.importance=tis"
        )


def check_started(rollout: RolloutConfig, num_prompts: int) -> None:
    """Raise InputError where a step starts more prompts than there are."""
    if num_prompts < rollout.num_started:
        raise InputError(
            f"data.path has {num_prompts} prompts, a step starts {rollout.num_started} "
            f"(rollout.prompts_per_step {rollout.prompts_per_step} x rollout.over_sampling "
            f"{rollout.over_sampling:g}); add rows or lower one of them"
        )
