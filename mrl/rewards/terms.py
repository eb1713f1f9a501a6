"""Combines several rewards, and the parts of a reward, into one reward per sample.

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
    """Return a recipe's rewards as a list.

    A recipe may give a single reward as a string, which is the reward's path; its weight is then 1.
    """
    return [RewardConfig(path=rewards)] if isinstance(rewards, str) else list(rewards)


def all_terms(recipe: Recipe) -> list[RewardConfig]:
    """Return the rewards of a recipe and of its data sources, without repeated paths."""
    own = () if recipe.reward is None else terms_of(recipe.reward)
    of_sources = (term for rewards in recipe.data.rewards.values() for term in terms_of(rewards))
    return list({term.path: term for term in (*of_sources, *own)}.values())


def combined(
    terms: Sequence[RewardConfig], entries: Sequence[Sequence[Entry]], failed: Mapping[int, str]
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the rewards of the G samples, and a dict from the name of each reward part to its
    values f32[G].

    `entries[i][j]` is what reward function `i` returned for sample `j`. As in TRL, a sample's
    reward is the weighted sum of the functions' rewards that are not None. It is NaN if all of them
    are None. It is also NaN if a function failed on the sample (the sample's index is in `failed`),
    because the sum of the other functions' rewards would be on another scale.

    If there are several functions, the reward of each function is also one of the parts. A single
    reward without parts has no parts.
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
