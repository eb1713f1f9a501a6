"""Sampling masks. When `top_p` or `top_k` truncates the distribution from which a token is sampled,
the mask holds the tokens that were kept.

With the mask, the trainer normalises the probabilities over the same tokens as the engine did
(DeepSeek-V3.2, arXiv 2512.02556, section 3.1: "keep sampling mask").

Dimensions: T tokens of a sequence, M kept tokens in total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_KEPT = -1
"""Padding of `SamplingMask.rows` after the kept tokens."""


@dataclass(frozen=True)
class SamplingMask:
    """The tokens that `top_p` and `top_k` kept when each of T tokens was sampled. They are stored
    as a ragged array: the tokens kept for token t follow the tokens kept for token t - 1."""

    token_ids: Tensor
    """i32[M]: the ids of the kept tokens. The ids kept for one token are distinct and include that
    token."""
    counts: Tensor
    """i32[T]: the number of tokens kept for each token; 0 for a token that was not sampled."""

    def __post_init__(self) -> None:
        for name in ("token_ids", "counts"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.dim() != 1:
                raise ValueError(
                    f"SamplingMask.{name}: expected i32 of one dimension, got {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
        if not self.counts.is_meta and int(self.counts.sum()) != len(self.token_ids):
            raise ValueError(
                f"SamplingMask: the counts add up to {int(self.counts.sum())}, but there are "
                f"{len(self.token_ids)} kept tokens"
            )

    @staticmethod
    def of(sets: Sequence[Sequence[int]]) -> SamplingMask:
        """Return the mask of T tokens. `sets[t]` holds the ids of the tokens kept for token t; it
        is empty if token t was not sampled."""
        kept = [token for each in sets for token in each]
        counts = [len(each) for each in sets]
        return SamplingMask(
            torch.tensor(kept, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return len(self.counts)

    def outline(self) -> SamplingMask:
        """Return a mask of the same shapes without data, on the `meta` device."""
        return SamplingMask(self.token_ids.to("meta"), self.counts.to("meta"))

    def cut(self, num_tokens: int) -> SamplingMask:
        """Return the mask of the first `num_tokens` tokens."""
        counts = self.counts[:num_tokens]
        return SamplingMask(self.token_ids[: int(counts.sum())], counts)

    def rows(self, tokens: Tensor) -> Tensor:
        """Return i64[R, K]: for each of the positions `tokens` i64[R], the ids of the tokens kept
        at that position, padded with NOT_KEPT. K is the largest number of tokens kept at any of
        these positions."""
        counts = self.counts[tokens].long()
        first = (self.counts.long().cumsum(0) - self.counts)[tokens]
        place = torch.arange(int(counts.max()) if len(counts) else 0)
        if not len(place):
            return torch.full((len(tokens), 0), NOT_KEPT)
        inside = place < counts.unsqueeze(1)
        found = self.token_ids[(first.unsqueeze(1) + place).clamp(max=len(self.token_ids) - 1)]
        return torch.where(inside, found.long(), NOT_KEPT)


def join_masks(parts: Sequence[tuple[SamplingMask | None, int]]) -> SamplingMask | None:
    """Join the masks of consecutive parts of a sequence; return None if no part has a mask.

    parts: pairs (mask or None, number of tokens). The tokens of a part without a mask get a count
    of 0. Raises ValueError if a mask covers a different number of tokens than its part has.
    """
    if all(mask is None for mask, _ in parts):
        return None
    none = torch.zeros(0, dtype=torch.int32)
    for mask, size in parts:
        if mask is not None and mask.num_tokens != size:
            raise ValueError(f"sampling mask: got {mask.num_tokens} tokens, expected {size}")
    return SamplingMask(
        torch.cat([none if mask is None else mask.token_ids for mask, _ in parts]),
        torch.cat([none.new_zeros(n) if mask is None else mask.counts for mask, n in parts]),
    )
