"""Find the rows that samples of one prompt have in common, so that a micro-batch computes them once.

A row is what the model computes for one token. Row t of two samples is the same if they have the same
tokens up to t and the same routes up to t. It is *shared* only if token t + 1, which it predicts, is
the same too. So the last common token is computed for each sample, and no shared row has two labels.

The number of common rows is an ultrametric: three samples form three pairs, and the two lowest of
the three pairs' numbers are equal. Each sample therefore needs only one earlier sample with which
it has the most rows in common (`SharedPrefixes`), and the order of the samples does not change how
many rows remain.

Dimensions: G samples of a prompt, T tokens of a sample, B sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moe.align import as_bytes
from mrl.shared_prefixes import SharedPrefixes
from mrl.types import Sample, TokenRoutes


def common_rows(
    samples: Sequence[Sample], routes: Sequence[TokenRoutes | None], multiple_of: int = 1
) -> Tensor:
    """Return i64[G, G]: the number of leading rows that each pair of samples can share.

    routes: for each sample the routes of its first T-1 rows in the layers of this rank; None for a
    sample without routes. multiple_of: the numbers are rounded down to a multiple of this.

    Two samples can share a row only if their captured routes of the row, with the gate weights, are
    equal byte by byte, or if neither sample has a captured route there. If a sample has a sampling
    mask, it shares only rows before the one that predicts its first loss token. The diagonal of the
    result is 0.
    """
    common = torch.zeros(len(samples), len(samples), dtype=torch.int64)
    route = cache(lambda sample, row: _route(routes[sample], row))
    tokens = pad_sequence([each.token_ids for each in samples], batch_first=True, padding_value=-1)
    for i in range(1, len(samples)):
        unknown = torch.arange(i)
        known, most = 0, len(samples[i].token_ids) - 1
        while len(unknown):  # all of them have at least `known` rows in common with sample i
            common[i, unknown] = known
            if known >= most:
                break
            label = known + 1  # what row `known` predicts must be the same
            unknown = unknown[tokens[unknown, label] == tokens[i, label]]
            own = route(i, known)
            unknown = unknown[[route(n, known) == own for n in unknown.tolist()]]
            if not len(unknown):
                break
            other = int(unknown[0])
            known = _compare(samples, routes, i, other, known)
            apart = common[other, unknown]
            common[i, unknown] = apart.clamp(max=known)
            common[i, other] = known
            unknown = unknown[(apart == known) & (unknown != other)]
        common[:i, i] = common[i, :i]
    limits = torch.tensor([_limit(sample) for sample in samples], dtype=torch.int64)
    common = common.minimum(limits).minimum(limits.unsqueeze(1))
    return common // multiple_of * multiple_of


def shared_prefixes(common: Tensor) -> SharedPrefixes:
    """Choose for each sequence of a micro-batch the earlier sequence whose rows it shares.

    common: i64[B, B], the number of leading rows that each pair of sequences can share; 0 for
    sequences of different prompts.
    """
    leaders, num_rows = [], []
    for i in range(len(common)):
        best = int(common[i, :i].argmax()) if i else 0
        count = int(common[i, best]) if i else 0
        leaders.append(best if count else i)
        num_rows.append(count)
    return SharedPrefixes(tuple(leaders), tuple(num_rows))


def _limit(sample: Sample) -> int:
    """Return the largest number of rows that a sample may share."""
    if sample.sampling_mask is None or not bool(sample.loss_mask.any()):
        return len(sample.token_ids)
    return max(0, int(sample.loss_mask.int().argmax()) - 1)


def _route(routes: TokenRoutes | None, row: int) -> bytes | None:
    """Return the chosen experts of a row, which differ only in rows that cannot be shared; None if no
    route was captured."""
    if routes is None or not bool(routes.captured[row]):
        return None
    return as_bytes(routes.expert_ids[row]).cpu().numpy().tobytes()


def _compare(
    samples: Sequence[Sample], routes: Sequence[TokenRoutes | None], i: int, j: int, known: int
) -> int:
    """Return the number of leading rows that samples i and j can share. The caller knows already
    that it is at least `known`."""
    a, b = samples[i].token_ids, samples[j].token_ids
    num_tokens = min(len(a), len(b))
    count = _first_difference(a[known:num_tokens], b[known:num_tokens]) + known - 1
    first, second = routes[i], routes[j]
    if count <= known or (first is None and second is None):
        return max(count, known)
    if first is None or second is None:
        return known
    rows = slice(known, count)
    differs = first.captured[rows] != second.captured[rows]
    for x, y in ((first.expert_ids, second.expert_ids), (first.weights, second.weights)):
        if x is not None and y is not None:
            unlike = (as_bytes(x[rows]) != as_bytes(y[rows])).flatten(1).any(1)
            differs |= unlike & first.captured[rows]
        elif x is not y:
            return known
    return known + _first_true(differs)


def _first_difference(a: Tensor, b: Tensor) -> int:
    """Return the index of the first element in which two vectors of equal length differ; their
    length if they are equal."""
    return _first_true(a != b)


def _first_true(flags: Tensor) -> int:
    return int(flags.int().argmax()) if bool(flags.any()) else len(flags)
