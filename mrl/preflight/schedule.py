"""This module computes the steps over which a run trains and its learning rate decays."""

from __future__ import annotations

from mrl.config import OptimizerConfig, Recipe
from mrl.errors import InputError

_OF_DECAY = ("lr_decay_steps", "min_lr", "wsd_decay_steps", "lr_wsd_decay_style")
"""Keys of `optimizer` that do nothing while the learning rate is constant."""


def with_schedule(recipe: Recipe) -> Recipe:
    """Return the recipe with `optimizer.lr_decay_steps` filled in, where the learning rate decays.

    Raises InputError where the keys of the schedule contradict each other.
    """
    config = recipe.optimizer
    if config.lr_decay_style == "constant":
        _refuse_without_decay(config)
        return recipe
    steps = config.lr_decay_steps
    if steps is None:
        steps = recipe.train.num_steps * recipe.train.num_steps_per_rollout
    if config.lr_warmup_steps >= steps:
        raise InputError(
            f"optimizer.lr_warmup_steps is {config.lr_warmup_steps}, but the learning rate has decayed "
            f"after {steps} optimizer steps (optimizer.lr_decay_steps, warm-up included); give it more "
            "of them, or a shorter warm-up"
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
    for name in _OF_DECAY:
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
