"""Which sample groups have two rewards that differ (the others have zero variance and teach nothing),
and the means of the parts of rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.types import SampleGroup


def has_signal(rewards: Tensor) -> bool:
    """Whether two of f32[G] rewards differ; NaN are none."""
    known = rewards[~rewards.isnan()]
    return bool((known != known[:1]).any())


def part_means(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return `rewards/NAME/mean` of every part of the rewards, over the samples that have it."""
    found: dict[str, list[Tensor]] = {}
    for group in groups:
        for name, values in (group.reward_parts or {}).items():
            found.setdefault(name, []).append(values)
    means = {name: torch.cat(found[name]).double().nanmean() for name in sorted(found)}
    return {f"rewards/{name}/mean": float(mean) for name, mean in means.items()}


def zero_variance_metrics(rewards: Sequence[torch.Tensor]) -> dict[str, float]:
    """Groups that teach nothing, in all and by cause; f32[G] rewards each.

    `unscored`: fewer than two samples have a reward, so nothing compares. Else all rewards are equal:
    `best` where no reward of the step is higher (solved), `worst` where none is lower (out of reach),
    `equal` in between, and where the whole step has one reward.
    """
    known = [group[~group.isnan()] for group in rewards]
    all_known = torch.cat(known) if known else torch.empty(0)
    low, high = (float(all_known.min()), float(all_known.max())) if len(all_known) else (0.0, 0.0)
    causes = dict.fromkeys(("unscored", "best", "worst", "equal"), 0.0)
    for group in known:
        if len(group) < 2:
            causes["unscored"] += 1
        elif bool((group == group[0]).all()):
            value = float(group[0])
            at_end = low < high and value in (low, high)
            causes[("best" if value == high else "worst") if at_end else "equal"] += 1
    return {
        "reward/zero_signal_groups": sum(causes.values()),
        **{f"reward/zero_signal/{cause}": count for cause, count in causes.items()},
    }
