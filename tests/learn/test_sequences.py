"""The samples that are made of a client's sequences, for the replay of their routes."""

from __future__ import annotations

import pytest
import torch

from moe.provenance import without_stale_tokens
from mrl.learn.sequences import Weighted, _sample
from mrl.types import UNKNOWN_VERSION, RoutingTrace, VersionSpan

NUM_TOKENS, PROMPT_LEN = 6, 3


@pytest.mark.parametrize(
    ("rows", "in_loss", "stale"),
    [
        ([(7, 0, 5)], [3, 4, 5], []),
        ([(6, 0, 2), (7, 2, 5)], [3, 4, 5], [0, 1]),  # a cached prefix of older weights
        ([(UNKNOWN_VERSION, 0, 2), (7, 2, 5)], [3, 4, 5], [0, 1]),
        ([(6, 0, 4), (7, 4, 5)], [3, 4, 5], []),  # the weights changed between two tokens
        ([(UNKNOWN_VERSION, 0, 4), (7, 4, 5)], [5], [0, 1, 2, 3]),
    ],
)
def test_only_tokens_before_which_a_row_is_stale_leave_the_loss(
    rows: list[tuple[int, int, int]], in_loss: list[int], stale: list[int]
) -> None:
    spans = tuple(VersionSpan(*row) for row in rows)
    ids = torch.zeros((NUM_TOKENS - 1, 1, 1), dtype=torch.uint8)
    factors = (torch.arange(NUM_TOKENS) >= PROMPT_LEN).float()
    given = Weighted(
        torch.arange(NUM_TOKENS), factors, -factors, routing=RoutingTrace(ids, (1,), 2, spans, 0)
    )
    (kept,), (found,) = without_stale_tokens([_sample(0, PROMPT_LEN, given)])
    assert kept.loss_mask.nonzero().flatten().tolist() == in_loss
    assert ([] if found is None else found.nonzero().flatten().tolist()) == stale
