"""Groups in which several samples are branches of one episode, which has one reward.

Dimensions: G samples of a group, E <= G episodes. Episode e of G samples has its number in
`SampleGroup.episodes`, and its first sample stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def of_episodes(values: Tensor, episodes: Sequence[int] | None) -> Tensor:
    """Return the values [E] of a group's episodes, given those of its samples [G]."""
    if episodes is None:
        return values
    return values[torch.tensor([episodes.index(e) for e in range(max(episodes) + 1)])]


def of_samples(values: Tensor, episodes: Sequence[int] | None) -> Tensor:
    """Return the values [G] of a group's samples, given those of its episodes [E]."""
    return values if episodes is None else values[torch.tensor(episodes)]
