"""Adds up several rewards, and parts of one, to the reward of each sample.

Dimensions: G samples of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrl.config import Recipe, RewardConfig
from mrl.rewards.base import Entry, parts_of, total_of


def terms_of(rewards: str | Sequence[RewardConfig]) -> list[RewardConfig]:
    """Return a recipe's rewards as a list; a single one has the name that its path gives it."""
    return [RewardConfig(path=rewards)] if isinstance(rewards, str) else list(rewards)


def all_terms(recipe: Recipe) -> list[RewardConfig]:
    """Return the rewards of a recipe and of the sources of its data, each path once."""
    own = () if recipe.reward is None else terms_of(recipe.reward)
    of_sources = (term for rewards in recipe.data.rewards.values() for term in terms_of(rewards))
    return list({term.path: term for term in (*of_sources, *own)}.values())


def combined(
    terms: Sequence[RewardConfig], entries: Sequence[Sequence[Entry]], failed: Mapping[int, str]
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the reward of each of the G samples, and f32[G] of each part by name.

    The reward is the sum of weight x reward over the rewards that have one for the sample, as in TRL: a
    reward that is None leaves the sum and masks nothing else. A sample has no reward (NaN) where all
    are None, and where one failed on it (`failed`, by place): the rest would be on another scale.
    A single reward without parts has no parts here.
    """
    size = len(entries[0])
    totals, parts = [math.nan] * size, {}
    several = len(terms) > 1
    for index in range(size):
        weighted = []
        for term, values in zip(terms, entries, strict=True):
            total = total_of(values[index])
            prefix = f"{term.name}/" if several else ""
            own = {prefix + name: value for name, value in parts_of(values[index]).items()}
            for name, value in (own | ({term.name: total} if several else {})).items():
                part = parts.setdefault(name, [math.nan] * size)
                part[index] = math.nan if value is None else value
            if total is not None:
                weighted.append(term.weight * total)
        if weighted and index not in failed:
            totals[index] = sum(weighted)
    return totals, {name: torch.tensor(parts[name], dtype=torch.float32) for name in sorted(parts)}
