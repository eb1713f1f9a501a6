"""Checks what a recipe asks of its algorithm beside the algorithm itself.

Reference, critic, shaping of rewards, dynamic sampling. All raise InputError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrl.algorithms import load_algorithm
from mrl.algorithms.base import Algorithm, traits
from mrl.config import AlgorithmConfig, CriticConfig, Recipe
from mrl.errors import InputError
from mrl.preflight.weights import check_weights
from mrl.run.changes import Change
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel


def read_reference(
    algorithm: AlgorithmConfig, model: HfModel, *, deep: bool = False
) -> HfModel | None:
    """Return the frozen model of the KL penalty; None without one.

    `deep`: as `check_weights` has it.
    """
    path = algorithm.reference_path
    if not algorithm.kl_coef:
        if path is not None:
            raise InputError(
                f"algorithm.reference_path is {path}, but algorithm.kl_coef is 0; give it a weight, or "
                "leave the reference out"
            )
        return None
    if path is None:
        return model
    try:
        reference = model.read_like(path)
        check_weights(reference, deep=deep)
    except InputError as error:
        raise InputError(str(error).replace("model.path", "algorithm.reference_path")) from None
    if differences := model.differences(reference):
        raise InputError(
            f"algorithm.reference_path {path}: {', '.join(differences)}; give a model of the "
            f"architecture and sizes of {model.path}"
        )
    return reference


def read_critic(
    recipe: Recipe, needed: bool, model: HfModel, dims: ParallelDims, *, deep: bool = False
) -> HfModel | None:
    """Return the model that the critic starts from; None where the algorithm needs none. `deep`: as
    `check_weights` has it."""
    config, name = recipe.critic, recipe.algorithm.name
    if not needed:
        if config != CriticConfig():
            raise InputError(
                f"critic: given, but algorithm {name} has no critic; leave the branch out, or choose "
                "ppo or vapo"
            )
        return None
    if config.path is None:
        return model
    try:
        critic = model.read_like(config.path)
        dims.check_model(critic.sizes)
        check_weights(critic, deep=deep, may_lack=("lm_head.weight",))
    except InputError as error:
        text = str(error).replace("model.path", "critic.path")
        raise InputError(text if "critic.path" in text else f"critic.path: {text}") from None
    if critic.sizes.vocab_size < model.sizes.vocab_size:
        raise InputError(
            f"critic.path {config.path}: a vocabulary of {critic.sizes.vocab_size}, expected at least "
            f"the policy's {model.sizes.vocab_size}: it reads the same tokens"
        )
    return critic


def check_critic_stays(changes: Sequence[Change], needs_critic: bool) -> None:
    """Raise InputError where a run that has begun gets a critic with another algorithm, or loses it."""
    for change in changes:
        if change.key != "algorithm.name":
            continue
        try:
            had = traits(load_algorithm(change.old)).needs_critic
        except InputError:  # a file that is gone: the checkpoint's own check follows
            continue
        if had != needs_critic:
            names = {had: change.old, needs_critic: change.new}
            raise InputError(
                f"algorithm.name is {change.old!r} there and {change.new!r} now: {names[True]} has a "
                f"critic and {names[False]} has none, which never changes in a run; start another run "
                "in a new output_dir"
            )


def check_shaping(recipe: Recipe) -> None:
    """Check that overlong shaping and filtering have single answers of several lengths, and that
    turn rewards have turns."""
    _check_turn_rewards(recipe)
    algorithm, rollout = recipe.algorithm, recipe.rollout
    buffer = algorithm.overlong_buffer_len
    if buffer > rollout.max_response_len:
        raise InputError(
            f"algorithm.overlong_buffer_len is {buffer}, expected at most rollout.max_response_len "
            f"{rollout.max_response_len}"
        )
    used = "overlong_buffer_len" if buffer else "overlong_filter"
    if not buffer and not algorithm.overlong_filter:
        return
    if recipe.environment is not None:
        raise InputError(
            f"algorithm.{used}: an episode has several answers, and rollout.max_response_len is for "
            "each of them; leave it out, or let the environment judge lengths"
        )
    if rollout.min_response_len:
        raise InputError(
            f"algorithm.{used}: with rollout.min_response_len {rollout.min_response_len} every answer "
            "is cut off at the same length; set one of them to 0"
        )


def _check_turn_rewards(recipe: Recipe) -> None:
    """Check that there are rewards of turns, and nothing that cannot be credited beside them."""
    algorithm = recipe.algorithm
    if not algorithm.turn_rewards:
        return
    if recipe.environment is None:
        raise InputError(
            "algorithm.turn_rewards: a reward function gives one reward for the whole sample; train in "
            "an environment, or leave turn_rewards out"
        )
    if algorithm.name == "gspo_token" and algorithm.kl_coef and algorithm.kl_in == "reward":
        raise InputError(
            "algorithm.turn_rewards: gspo_token normalises turn rewards within a group, and the KL in "
            "the reward would be subtracted from what is left; set algorithm.kl_in=loss"
        )


def check_group_size(recipe: Recipe, algorithm: Algorithm) -> None:
    """Check that a single sample of a prompt teaches anything."""
    if recipe.rollout.samples_per_prompt > 1 or recipe.debug.rollout_only:
        return
    alone = [torch.tensor([0.0]), torch.tensor([1.0])]
    if not any(bool(own.any()) for own in algorithm.advantages(alone, recipe.algorithm)):
        raise InputError(
            f"rollout.samples_per_prompt is 1, but {recipe.algorithm.name} compares the samples of a "
            "prompt with each other: every advantage would be 0; raise it, or choose ppo, vapo or "
            "reinforce_pp"
        )


def check_dynamic_sampling(recipe: Recipe) -> None:
    """Check dynamic sampling, whose rounds draw what is missing and wait for all of it."""
    rollout, on = recipe.rollout, recipe.algorithm.dynamic_sampling
    rounds = rollout.dynamic_sampling_rounds
    if not on and rounds != type(rollout).model_fields["dynamic_sampling_rounds"].default:
        raise InputError(
            f"rollout.dynamic_sampling_rounds is {rounds}, but algorithm.dynamic_sampling is off; turn "
            "it on, or leave the rounds out"
        )
    if on and rollout.over_sampling != 1:
        raise InputError(
            f"algorithm.dynamic_sampling: rollout.over_sampling is {rollout.over_sampling:g}, but a "
            "round knows which prompts have a signal only when all are whole; set it to 1"
        )
    if on and rollout.samples_per_prompt < 2:
        raise InputError(
            "algorithm.dynamic_sampling: with rollout.samples_per_prompt 1 no group has a signal; "
            "raise it"
        )
