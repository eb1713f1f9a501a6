"""Check a recipe with `rollout.placement: disaggregated`, and the keys of `async`."""

from __future__ import annotations

from mrl.algorithms import load_algorithm, traits
from mrl.config import Recipe
from mrl.config.asynchronous import AsyncConfig
from mrl.errors import InputError
from mrl.weight_sync.transports import check_transport

_FREE_KEYS = ("at_bound", "in_flight_updates", "kv", "stale_prefixes", "groups_in_flight")
_AHEAD = "the engines run ahead (async.max_staleness {0})"


def check_asynchronous(recipe: Recipe) -> None:
    """Raise InputError for settings that do not work in a disaggregated run.

    In a colocated run, the keys of `async` have no effect, so InputError is raised if one of them
    is not at its default. In both kinds of run, InputError is raised if the weight transport does
    not exist or does not support the recipe's `rollout.placement`.
    """
    config, is_colocated = recipe.asynchronous, recipe.rollout.placement == "colocated"
    _check_encoding(recipe)
    check_transport(
        recipe.rollout.weight_sync,
        is_disaggregated=not is_colocated,
        sends_deltas=recipe.rollout.weight_encoding == "delta",
    )
    if is_colocated:
        given = [name for name in AsyncConfig.model_fields if name in config.model_fields_set]
        changed = [name for name in given if getattr(config, name) != getattr(AsyncConfig(), name)]
        if changed:
            raise InputError(
                f"async.{changed[0]} is set, but rollout.placement is colocated, where engines and "
                "trainer take turns; set rollout.placement=disaggregated, or leave it out"
            )
        return
    _check_engine(recipe)
    _check_keys(config)
    if config.max_staleness:
        _check_ahead(recipe)


def _check_encoding(recipe: Recipe) -> None:
    """Raise InputError for `rollout.weight_encoding: delta` in a run for which deltas save nothing.

    InputError is also raised if `rollout.full_sync_every` is set although every version of the
    weights is sent whole.
    """
    rollout = recipe.rollout
    if rollout.weight_encoding == "delta" and rollout.placement == "colocated":
        raise InputError(
            "rollout.weight_encoding is delta, but rollout.placement is colocated: the engine reads "
            "the trainer's memory, so nothing travels, and it drops its own weights when it sleeps, so "
            "a delta has no base; leave it at full, or set rollout.placement=disaggregated"
        )
    if rollout.weight_encoding == "delta" and recipe.lora and recipe.lora.rollout == "adapter":
        raise InputError(
            "rollout.weight_encoding is delta, but lora.rollout is adapter: all of an adapter changes "
            "in a step, so a delta saves nothing; leave it at full, or set lora.rollout=merged"
        )
    if rollout.weight_encoding == "full" and rollout.full_sync_every is not None:
        raise InputError(
            f"rollout.full_sync_every is {rollout.full_sync_every}, but rollout.weight_encoding is "
            "full, which sends every version whole; set rollout.weight_encoding=delta, or leave it out"
        )


def _check_keys(config: AsyncConfig) -> None:
    """Raise InputError if a key of `async` would have no effect because of another key of `async`."""
    for name in _FREE_KEYS:
        if not config.is_free and getattr(config, name) != getattr(AsyncConfig(), name):
            raise InputError(
                f"async.{name} is set, but it only applies to engines that run freely "
                "(async.max_staleness above 0, without async.deterministic); leave it out"
            )
    if config.in_flight_updates == "finish" and config.kv != "keep":
        raise InputError(
            f"async.kv is {config.kv}, but with async.in_flight_updates=finish no request is "
            "interrupted; set async.in_flight_updates=interrupt, or leave kv out"
        )


def _check_engine(recipe: Recipe) -> None:
    if recipe.profile.steps and recipe.profile.engine:
        raise InputError(
            "profile.engine is on, but it does not profile the engines of a disaggregated run; turn it "
            "off"
        )


def _check_ahead(recipe: Recipe) -> None:
    """Check a recipe whose engines may generate with older weights than the trainer's."""
    config, rollout, algorithm = recipe.asynchronous, recipe.rollout, recipe.algorithm
    ahead = _AHEAD.format(config.max_staleness)
    if rollout.over_sampling != 1:
        raise InputError(
            f"rollout.over_sampling is {rollout.over_sampling:g}, but {ahead}: which prompts a step "
            "leaves unfinished is not known when the next one begins; set it to 1"
        )
    if algorithm.dynamic_sampling and config.deterministic:
        raise InputError(
            f"algorithm.dynamic_sampling is on, but {ahead}: additional prompts of a batch would be "
            "sampled with newer weights than its first ones; turn it off, or set async.max_staleness=0"
        )
    if recipe.rollout.true_on_policy:
        raise InputError(
            f"rollout.true_on_policy is on, but {ahead}, so samples come from older weights than the "
            "trainer's; turn it off, or set async.max_staleness=0"
        )
    corrects = traits(load_algorithm(algorithm.name)).corrects_rollout
    if algorithm.importance == "none" and algorithm.old_logprobs == "trainer" and not corrects:
        raise InputError(
            f"algorithm.importance is none, but {ahead}: tokens sampled by older weights would count "
            "as if the current weights had sampled them; set algorithm.importance=tis, "
            "algorithm.old_logprobs=rollout, or an algorithm that corrects for it (decoupled_ppo, "
            "a3po)"
        )
