"""How far two tensors that should be the same bits are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Difference:
    """A difference is between two tensors [rows, ...]; zeros are equal whatever their sign."""

    num_rows: int
    num_different_rows: int
    largest: float
    """Largest absolute difference."""
    ulp: float
    """Largest difference in units of the last place of the row's largest element."""

    @property
    def is_equal(self) -> bool:
        return not self.num_different_rows

    def text(self) -> str:
        if self.is_equal:
            return "equal"
        return f"{self.num_different_rows}/{self.num_rows} rows, {self.largest:.1e}, {self.ulp:.0f} ulp"


def compare(ours: Tensor, theirs: Tensor) -> Difference:
    """Raises ValueError where the shapes differ."""
    if ours.shape != theirs.shape:
        raise ValueError(f"compare: got {list(ours.shape)} and {list(theirs.shape)}")
    ours, theirs = (x.reshape(len(x), -1).double() for x in (ours, theirs))
    gap = (ours - theirs).abs()
    unit = (
        EPSILON
        * 2.0
        ** torch.maximum(ours.abs(), theirs.abs())
        .amax(1, keepdim=True)
        .clamp(min=1e-30)
        .log2()
        .floor()
    )
    return Difference(
        num_rows=len(gap),
        num_different_rows=int((gap > 0).any(1).sum()),
        largest=float(gap.max()),
        ulp=float((gap / unit).max()),
    )
