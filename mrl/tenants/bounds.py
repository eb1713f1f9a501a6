"""Bounds of what one recipe may ask for: beyond them a tenant would take the service from all others.

They are far beyond what a run needs, and no keys: whoever wants more trains alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from mrl.config import Recipe
from mrl.config.data import Paths, paths_of
from mrl.config.reward import Rewards
from mrl.rewards.terms import terms_of

MAX_SAMPLES = 65_536
"""Samples of a step, which lie in the memory of the service. A set of an evaluation has at most so many
for each prompt."""
MAX_WORKERS = 64
"""Processes of rewards and environments, for each engine."""
MAX_ROUNDS = 64
"""Rounds of `algorithm.dynamic_sampling` in a step; the others wait for the last of them."""


def beyond_bounds(recipe: Recipe) -> Iterator[str]:
    """Yield what of a recipe is beyond the bounds, with the reason."""
    rollout = recipe.rollout
    samples = rollout.prompts_per_step * rollout.over_sampling * rollout.samples_per_prompt
    if samples > MAX_SAMPLES:
        yield (
            "rollout.prompts_per_step x over_sampling x samples_per_prompt is "
            f"{samples:.6g}, but a tenant of a service has at most {MAX_SAMPLES} samples a step"
        )
    for each in recipe.eval.sets:
        if each.samples_per_prompt > MAX_SAMPLES:
            yield (
                f"eval set {each.name}: samples_per_prompt is {each.samples_per_prompt}, but a tenant "
                f"of a service has at most {MAX_SAMPLES}"
            )
    if (workers := num_workers(recipe)) > MAX_WORKERS:
        yield (
            f"the rewards and environments take {workers} processes (each reward one, of each "
            f"evaluation set its own; environment.num_workers), but a tenant of a service has at most "
            f"{MAX_WORKERS}"
        )
    if rollout.dynamic_sampling_rounds > MAX_ROUNDS:
        yield (
            f"rollout.dynamic_sampling_rounds is {rollout.dynamic_sampling_rounds}, but the other "
            f"tenants wait for them; give at most {MAX_ROUNDS}"
        )
    for path in _data_paths(recipe):
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            yield f"{path} is a device, a pipe or a socket, but data is read from files; name a file"


def num_workers(recipe: Recipe) -> int:
    """Return the processes that rewards and environments take beside one engine."""
    workers = 0 if recipe.environment is None else recipe.environment.num_workers
    own = workers + _number(recipe.reward)
    of_sets = (_number(each.reward) if each.reward else own for each in recipe.eval.sets)
    return own + sum(map(_number, recipe.data.rewards.values())) + sum(of_sets)


def _number(rewards: Rewards | None) -> int:
    return 0 if rewards is None else len(terms_of(rewards))


def _data_paths(recipe: Recipe) -> Iterator[str]:
    """Yield the files and folders that rows are read from."""
    rows = [*recipe.data.all_sources, *recipe.eval.sets]
    paths: list[Paths] = [each.path for each in rows]
    if recipe.sft is not None:
        paths.append(recipe.sft.path)
    for each in paths:
        yield from paths_of(each)
