"""Check importance weights, partial rollouts and over-sampling."""

from __future__ import annotations

from mrl.algorithms import load_algorithm, traits
from mrl.algorithms.corrections import importance_weight
from mrl.config import AlgorithmConfig, Recipe, RolloutConfig
from mrl.errors import InputError


def check_importance(algorithm: AlgorithmConfig) -> None:
    """Raise InputError if the range of importance weights is empty.

    InputError is also raised if the range or the level (token or sequence) of the weights is set
    although `algorithm.importance` is `none`.
    """
    defaults = AlgorithmConfig()
    for name in ("importance_low", "importance_high", "importance_level"):
        value = getattr(algorithm, name)
        if value != getattr(defaults, name) and algorithm.importance == "none":
            raise InputError(
                f"algorithm.{name} is {value}, but algorithm.importance is none; choose tis or mis, or "
                f"leave {name} out"
            )
    try:
        importance_weight(algorithm)
    except ValueError as error:
        raise InputError(f"algorithm.{error}") from None


def check_partial_rollouts(recipe: Recipe, num_engines: int) -> None:
    """Raise InputError for settings of partial rollouts that would bias the training or have no
    effect.

    InputError is also raised if over-sampling has no effect on some engine, or is used with an
    environment.
    """
    rollout = recipe.rollout
    if rollout.over_sampling != 1:
        _check_shares(rollout, num_engines)
    if recipe.environment is not None and rollout.over_sampling != 1:
        raise InputError(
            f"rollout.over_sampling is {rollout.over_sampling:g}, but a step waits for all episodes "
            "of an environment; set it to 1"
        )
    if rollout.partial_rollouts != "drop" and rollout.over_sampling == 1:
        raise InputError(
            f"rollout.partial_rollouts is {rollout.partial_rollouts}, but with "
            "rollout.over_sampling 1.0 every prompt finishes; start more than a step needs "
            "(e.g. 1.5), or leave it at drop"
        )
    corrects = traits(load_algorithm(recipe.algorithm.name)).corrects_rollout
    if (
        rollout.partial_rollouts == "resume"
        and recipe.algorithm.importance == "none"
        and recipe.algorithm.old_logprobs == "trainer"
        and not corrects
    ):
        raise InputError(
            "rollout.partial_rollouts is resume, but algorithm.importance is none: tokens sampled by "
            "older weights would count as if the current weights had sampled them; set "
            "algorithm.importance=tis"
        )


def _check_shares(rollout: RolloutConfig, num_engines: int) -> None:
    """Raise InputError if over-sampling has no effect on some engine.

    That is the case if the engine starts no more prompts than the step needs from it.
    """
    for number in range(num_engines):
        started, wanted = (
            len(range(number, total, num_engines))
            for total in (rollout.num_started, rollout.prompts_per_step)
        )
        if wanted and started == wanted:
            raise InputError(
                f"rollout.over_sampling {rollout.over_sampling:g}: of {rollout.num_started} prompts "
                f"for {rollout.prompts_per_step}, engine {number} of {num_engines} starts {started} "
                "and waits for all of them; raise it, or rollout.prompts_per_step"
            )


def check_started(rollout: RolloutConfig, num_prompts: int) -> None:
    """Raise InputError if a step starts more prompts than the data set has."""
    if num_prompts < rollout.num_started:
        raise InputError(
            f"data.path has {num_prompts} prompts, a step starts {rollout.num_started} "
            f"(rollout.prompts_per_step {rollout.prompts_per_step} x rollout.over_sampling "
            f"{rollout.over_sampling:g}); add rows or lower one of them"
        )
