"""Which leading rows the sequences of a micro-batch share (`train.share_prefixes`).

A row is what the model computes for one token. Shared rows are computed once. Everything per token,
such as the loss, still has an entry for each token of each sequence.

Dimensions: B sequences of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_GAIN = 1.2
"""With `train.share_prefixes: auto`, samples share rows in a step only if at least this many times
fewer rows are computed that way. A smaller gain does not pay, because a row costs more in a
micro-batch with shared rows: attention needs a mask and copies of the keys, and values of a row are
copied for all tokens that share the row. docs/prefixes.md has measurements."""
MAX_TOKENS_PER_ROW = 4
"""A micro-batch has at most this many times `train.micro_batch_tokens` tokens. Its rows are fewer, but
keys and values take memory for each token."""
MIN_QUERIES, MAX_BLOCKS = 256, 4
"""The rows of a sequence after its shared prefix become at most MAX_BLOCKS blocks of queries. If there
are several blocks, each has at least MIN_QUERIES rows. For such a block, attention computes the scores
of all pairs of a query and a key, even those that the causal mask then removes. Several small
blocks waste fewer scores than one large block, but each block needs its own copy of its keys."""


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


def expected_gain(prompt_len: float, response_len: float, num_samples: int) -> float:
    """Return the gain of sharing the prompt's rows: the number of rows that the samples of a prompt
    take without sharing, divided by the number with sharing.

    For G samples with P prompt tokens and R response tokens each, this is about G (P + R) / (P + G
    R). The exact number is slightly lower, because each sample computes the last prompt token
    itself.
    """
    shared = max(prompt_len - 1, 0)
    whole = num_samples * (prompt_len + response_len)
    return whole / (whole - (num_samples - 1) * shared)


def num_blocks(num_rows: int) -> int:
    """Return the number of blocks of queries of a sequence with `num_rows` rows after its shared
    prefix."""
    return min(max(num_rows // MIN_QUERIES, 1), MAX_BLOCKS)
