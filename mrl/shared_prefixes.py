"""Which leading rows the sequences of a micro-batch share (`train.share_prefixes`).

A row is what the model computes for one token. Shared rows are computed once. Everything per token,
such as the loss, still has an entry for each token of each sequence.

Dimensions: B sequences of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SharedPrefixes:
    """For each sequence the earlier sequence whose rows it shares, and how many of them."""

    leaders: tuple[int, ...]
    """B indices of sequences: the leader of each sequence, which is lower than its own index; its own
    index if it shares no rows."""
    num_rows: tuple[int, ...]
    """B numbers: the leading rows that each sequence takes from its leader."""

    @property
    def total(self) -> int:
        """The number of rows that are not computed, because they are those of another sequence."""
        return sum(self.num_rows)
