"""Metrics of rewards: the number of zero-variance groups, and the means of reward parts.

If all rewards of a group are equal, its variance and its advantages are 0, so the policy learns
nothing from the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.types import SampleGroup


def has_signal(rewards: Tensor) -> bool:
    """Return whether at least two of the rewards of a group, f32[G], differ. NaN is ignored."""
    known = rewards[~rewards.isnan()]
    return bool((known != known[:1]).any())


def part_means(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the metric `rewards/NAME/mean` for every reward part NAME: the mean of the part over
    all samples for which its value is not NaN."""
    found: dict[str, list[Tensor]] = {}
    for group in groups:
        for name, values in (group.reward_parts or {}).items():
            found.setdefault(name, []).append(values)
    means = {name: torch.cat(found[name]).double().nanmean() for name in sorted(found)}
    return {f"rewards/{name}/mean": float(mean) for name, mean in means.items()}


def zero_variance_metrics(rewards: Sequence[torch.Tensor]) -> dict[str, float]:
    """Count the zero-variance groups of a step: in total (`reward/zero_signal_groups`), and by cause
    (`reward/zero_signal/CAUSE`).

    rewards: f32[G] for each group. The causes are:
    unscored: fewer than two samples have a reward, so no rewards can be compared.
    best: all rewards of the group equal the highest reward of the step.
    worst: all rewards of the group equal the lowest reward of the step.
    equal: all rewards of the group equal a value between these two, or all rewards of the step are
    equal.
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
