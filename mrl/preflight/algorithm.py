"""Check the settings around the algorithm: reference, critic, reward shaping, dynamic sampling.

All functions raise InputError if a check fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrl.algorithms import load_algorithm
from mrl.algorithms.base import Algorithm, traits
from mrl.config import AlgorithmConfig, CriticConfig, Recipe
from mrl.errors import InputError
from mrl.run.changes import Change
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.weight_checks import check_weights


def read_reference(
    algorithm: AlgorithmConfig, model: HfModel, *, deep: bool = False
) -> HfModel | None:
    """Return the frozen reference model of the KL penalty; None if `algorithm.kl_coef` is 0.

    Without `algorithm.reference_path`, the reference is `model`, from which the policy starts.
    `deep`: check that all weights are finite, not only a sample of them.
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
    """Return the model from which the critic starts; None if `needed` is false.

    `needed` says whether the algorithm has a critic. Without `critic.path`, the critic starts from
    `model`, the policy's model. `deep`: check that all weights are finite, not only a sample of
    them.
    """
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
            f"the policy's {model.sizes.vocab_size}, because it reads the same tokens"
        )
    return critic


def check_critic_stays(changes: Sequence[Change], needs_critic: bool) -> None:
    """Raise InputError if a new algorithm would add or remove the critic of a started run.

    Nothing is checked if the old algorithm can no longer be loaded.
    """
    for change in changes:
        if change.key != "algorithm.name":
            continue
        try:
            had = traits(load_algorithm(change.old)).needs_critic
        except (
            InputError
        ):  # the old algorithm's file no longer exists; the checkpoint is checked when it loads
            continue
        if had != needs_critic:
            names = {had: change.old, needs_critic: change.new}
            raise InputError(
                f"algorithm.name was {change.old!r} and is {change.new!r} now: {names[True]} has a "
                f"critic and {names[False]} has none, which cannot change in a run; start another run "
                "in a new output_dir"
            )


def check_shaping(recipe: Recipe) -> None:
    """Check the settings of overlong shaping, the overlong filter, and turn rewards.

    Overlong shaping and the overlong filter work only if each sample has a single response, and if
    responses can differ in length. Turn rewards need an environment.
    """
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
            f"algorithm.{used}: an episode has several responses, and rollout.max_response_len limits "
            "each of them; leave it out, or let the environment judge lengths"
        )
    if rollout.min_response_len:
        raise InputError(
            f"algorithm.{used}: with rollout.min_response_len {rollout.min_response_len} every "
            "response is cut off at the same length; set one of them to 0"
        )


def _check_turn_rewards(recipe: Recipe) -> None:
    """Check that turn rewards come from an environment.

    Also check that `gspo_token` does not combine turn rewards with a KL penalty in the reward.
    """
    algorithm = recipe.algorithm
    if not algorithm.turn_rewards:
        return
    if recipe.environment is None:
        raise InputError(
            "algorithm.turn_rewards: a reward function gives one reward for the whole sample; train in "
            "an environment, or leave turn_rewards out"
        )
    if recipe.environment.is_agent:
        raise InputError(
            f"algorithm.turn_rewards: an episode of environment {recipe.environment.label} has one "
            "reward for the whole episode; leave turn_rewards out"
        )
    if algorithm.name == "gspo_token" and algorithm.kl_coef and algorithm.kl_in == "reward":
        raise InputError(
            "algorithm.turn_rewards: gspo_token normalises turn rewards within a group, and the KL in "
            "the reward would be subtracted from the normalised ones; set algorithm.kl_in=loss"
        )


def check_group_size(recipe: Recipe, algorithm: Algorithm) -> None:
    """Check `samples_per_prompt`: it must be at least 2 for an algorithm that compares samples.

    Such an algorithm compares the samples of a prompt with each other, and with a single sample per
    prompt every advantage is 0. Nothing is checked if the run only generates rollouts
    (`debug.rollout_only`).
    """
    if recipe.rollout.samples_per_prompt > 1 or recipe.debug.rollout_only:
        return
    rewards = [torch.tensor([0.0]), torch.tensor([1.0])]
    if not any(bool(each.any()) for each in algorithm.advantages(rewards, recipe.algorithm)):
        raise InputError(
            f"rollout.samples_per_prompt is 1, but {recipe.algorithm.name} compares the samples of a "
            "prompt with each other: every advantage would be 0; raise it, or choose ppo, vapo or "
            "reinforce_pp"
        )


def check_dynamic_sampling(recipe: Recipe) -> None:
    """Check dynamic sampling, which needs complete groups of at least two samples.

    If dynamic sampling is off, `rollout.dynamic_sampling_rounds` must have its default value.
    """
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
            "round knows which groups have a signal only when all of them are complete; set it to 1"
        )
    if on and rollout.samples_per_prompt < 2:
        raise InputError(
            "algorithm.dynamic_sampling: with rollout.samples_per_prompt 1 no group has a signal; "
            "raise it"
        )
