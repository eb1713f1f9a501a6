"""A sampling mask holds, for each token that was drawn from a truncated distribution, the tokens that
`top_p` and `top_k` had kept.

DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) calls it "keep sampling mask": the trainer normalises over
the same tokens as the engine did. T tokens, M kept tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOT_KEPT = -1
"""What fills `rows` behind the kept tokens."""


@dataclass(frozen=True)
class SamplingMask:
    """A sampling mask is ragged: the kept tokens of token t follow those of token t - 1."""

    token_ids: Tensor
    """i32[M]: the kept tokens, each once for a token, and the drawn one among them."""
    counts: Tensor
    """i32[T]: how many were kept; 0 for tokens that were not drawn."""

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
        """Return the mask of tokens that were each drawn from one of these sets."""
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
        """Return the shape without the numbers, on the `meta` device."""
        return SamplingMask(self.token_ids.to("meta"), self.counts.to("meta"))

    def cut(self, num_tokens: int) -> SamplingMask:
        """Return the mask of the first tokens alone."""
        counts = self.counts[:num_tokens]
        return SamplingMask(self.token_ids[: int(counts.sum())], counts)

    def rows(self, tokens: Tensor) -> Tensor:
        """Return i64[R, K]: the kept tokens of the tokens i64[R], with NOT_KEPT behind them; K is the
        largest number of any of them."""
        counts = self.counts[tokens].long()
        first = (self.counts.long().cumsum(0) - self.counts)[tokens]
        place = torch.arange(int(counts.max()) if len(counts) else 0)
        if not len(place):
            return torch.full((len(tokens), 0), NOT_KEPT)
        inside = place < counts.unsqueeze(1)
        found = self.token_ids[(first.unsqueeze(1) + place).clamp(max=len(self.token_ids) - 1)]
        return torch.where(inside, found.long(), NOT_KEPT)


def join_masks(parts: Sequence[tuple[SamplingMask | None, int]]) -> SamplingMask | None:
    """Return the masks of (mask, number of tokens) end to end; None where no part has one.

    Tokens of a part without a mask have no set. Raises ValueError where a mask has another number of
    tokens than its part.
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
