"""Which leading rows the sequences of a micro-batch share (`train.share_prefixes`).

A row is what the model computes for one token. Shared rows are computed once. Everything per token,
such as the loss, still has an entry for each token of each sequence.

Dimensions: B sequences of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SharedPrefixes:
    """The leading rows that each sequence of a micro-batch shares with an earlier one, its leader."""

    leaders: tuple[int, ...]
    """For each of the B sequences, the index of its leader in the micro-batch. A sequence that
    shares no rows with an earlier one has its own index here."""
    num_rows: tuple[int, ...]
    """For each of the B sequences, the number of leading rows that it takes from its leader."""

    @property
    def total(self) -> int:
        """The number of rows that are not computed, because sequences take them from their leaders."""
        return sum(self.num_rows)
