"""Compute the number of steps of a run, and the number of steps over which its learning rate decays."""

from __future__ import annotations

import math

from mrl.config import OptimizerConfig, Recipe
from mrl.errors import InputError

_DECAY_KEYS = ("lr_decay_steps", "min_lr", "wsd_decay_steps", "lr_wsd_decay_style")
"""Keys of `optimizer` that have no effect if the learning rate is constant."""


def with_schedule(recipe: Recipe, num_prompts: int) -> Recipe:
    """Return the recipe with the steps of its schedule filled in, for a data set of `num_prompts`.

    If the recipe gives `train.num_epochs`, `train.num_steps` is computed from it, and
    `train.num_epochs` is null in the result. `optimizer.lr_decay_steps` is filled in if the
    learning rate decays. Raises InputError if the keys of the schedule contradict each other.
    """
    return with_decay(_with_steps(recipe, num_prompts))


def _with_steps(recipe: Recipe, num_prompts: int) -> Recipe:
    train, rollout = recipe.train, recipe.rollout
    if not train.num_steps and train.num_epochs is None:
        is_given = "num_steps" in train.model_fields_set
        what = "expected at least 1, got 0" if is_given else "required, and not given"
        raise InputError(
            f"train.num_steps: {what}; give it, or train.num_epochs, the number of passes over the "
            "data set"
        )
    if train.num_epochs is None:
        return recipe
    if train.num_steps:
        raise InputError(
            f"train.num_steps is {train.num_steps} and train.num_epochs is {train.num_epochs:g}; give "
            "one of them, and 0 or null for the other"
        )
    if recipe.algorithm.dynamic_sampling or rollout.over_sampling != 1:
        other = (
            "algorithm.dynamic_sampling"
            if recipe.algorithm.dynamic_sampling
            else "rollout.over_sampling"
        )
        raise InputError(
            f"train.num_epochs is {train.num_epochs:g}, but with {other} the number of prompts that a "
            "step draws is not known in advance; give train.num_steps"
        )
    # The epsilon absorbs rounding: in floating point, 0.1 x 30 is a little more than 3.
    steps = math.ceil(train.num_epochs * num_prompts / rollout.prompts_per_step - 1e-9)
    return recipe.model_copy(
        update={"train": train.model_copy(update={"num_steps": steps, "num_epochs": None})}
    )


def with_decay(recipe: Recipe) -> Recipe:
    """Return the recipe with `optimizer.lr_decay_steps` filled in, if the learning rate decays.

    A value that the recipe gives is kept. The default is the number of optimizer steps in which the
    policy is trained. Steps in which only the critic warms up are not counted, unless the whole run
    is such a warm-up. Raises InputError if the keys of the schedule contradict each other.
    """
    config, train = recipe.optimizer, recipe.train
    if config.lr_decay_style == "constant":
        _refuse_without_decay(config)
        return recipe
    steps = config.lr_decay_steps
    if steps is None:
        warmup = recipe.critic.warmup_steps
        num_trained = train.num_steps - warmup if warmup < train.num_steps else train.num_steps
        steps = num_trained * train.num_epochs_per_rollout * train.num_steps_per_rollout
    if config.lr_warmup_steps >= steps:
        raise InputError(
            f"optimizer.lr_warmup_steps is {config.lr_warmup_steps}, but the learning rate has decayed "
            f"after {steps} optimizer steps (optimizer.lr_decay_steps, warm-up included); raise that, "
            "or shorten the warm-up"
        )
    if config.min_lr > config.lr:
        raise InputError(
            f"optimizer.min_lr is {config.min_lr}, above optimizer.lr {config.lr}; give a lower one"
        )
    _check_wsd(config, steps)
    return recipe.model_copy(
        update={"optimizer": config.model_copy(update={"lr_decay_steps": steps})}
    )


def _refuse_without_decay(config: OptimizerConfig) -> None:
    plain = OptimizerConfig()
    for name in _DECAY_KEYS:
        if getattr(config, name) != getattr(plain, name):
            raise InputError(
                f"optimizer.{name} is {getattr(config, name)}, but optimizer.lr_decay_style is "
                "constant; choose linear, cosine, inverse-square-root or WSD, or leave it out"
            )


def _check_wsd(config: OptimizerConfig, steps: int) -> None:
    num = config.wsd_decay_steps
    if config.lr_decay_style != "WSD":
        if num is not None:
            raise InputError(
                f"optimizer.wsd_decay_steps is {num}, but optimizer.lr_decay_style is "
                f"{config.lr_decay_style}; set that to WSD, or leave it out"
            )
        return
    if num is None:
        raise InputError(
            "optimizer.lr_decay_style is WSD, which decays over its last steps; give "
            "optimizer.wsd_decay_steps"
        )
    if num > steps - config.lr_warmup_steps:
        raise InputError(
            f"optimizer.wsd_decay_steps is {num}, but after the warm-up there are only "
            f"{steps - config.lr_warmup_steps} of the {steps} optimizer steps left; give fewer"
        )
