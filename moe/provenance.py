"""Which weights chose a row of routes, against which weights sampled the tokens that depend on it.

A row replayed from other weights than its token was sampled with says nothing about that token: it is
STALE. It is routed natively, and the token that was predicted from it leaves the loss.

Row r routes token r and predicts token r + 1. The rows of a prompt, and of what a tool wrote, predict
no token of the loss, but every later one attends to them. So one rule serves all: row r is stale where
its version is not that of the first loss token after it. Rows after the last loss token are never.

Everything here is a pure function of what all ranks know of a sample: they come to the same result.

T all tokens of a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mrl.types import Sample, VersionSpan

NO_VERSION = -1


def stale_rows(sample: Sample) -> Tensor | None:
    """bool[T-1], or None where no row is stale.

    Raises ValueError for a loss token that no span of `Sample.weight_versions` covers.
    """
    if sample.routing is None:
        return None
    rows, tokens = sample.routing.row_versions, sample.weight_versions
    num_tokens = sample.routing.num_rows + 1
    # The usual case, seen without reading a tensor: one version chose and sampled everything.
    whole = (VersionSpan(rows[0].version, sample.prompt_len, num_tokens),) if rows else ()
    if len(rows) == 1 and tokens == whole:
        return None
    versions = _per_position(tokens, num_tokens)
    unknown = sample.loss_mask & (versions == NO_VERSION)
    if bool(unknown.any()):
        raise ValueError(
            f"group {sample.group_id}: token {int(unknown.nonzero()[0])} is in the loss, and no span "
            f"of weight_versions covers it: {_pairs(tokens)}"
        )
    wanted = _next_loss_version(versions, sample.loss_mask)[1:]
    stale = (wanted != NO_VERSION) & (_per_position(rows, num_tokens - 1) != wanted)
    return stale if bool(stale.any()) else None


def without_stale_tokens(sample: Sample) -> Sample:
    """The sample without those loss tokens whose own row is stale."""
    stale = stale_rows(sample)
    if stale is None:
        return sample
    loss_mask = sample.loss_mask.clone()
    loss_mask[1:] &= ~stale
    return dataclasses.replace(sample, loss_mask=loss_mask)


def provenance_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rows over all samples of a step; of samples as they come from the rollout."""
    stale = [rows for rows in map(stale_rows, samples) if rows is not None]
    traces = [sample.routing for sample in samples if sample.routing is not None]
    return {
        "routing/stale_rows": float(sum(int(rows.sum()) for rows in stale)),
        "routing/cached_rows": float(sum(trace.num_cached_rows for trace in traces)),
        "routing/recomputed_rows": float(sum(trace.num_recomputed_rows for trace in traces)),
    }


def _per_position(spans: Iterable[VersionSpan], size: int) -> Tensor:
    """i64[size]; NO_VERSION where no span is."""
    versions = torch.full((size,), NO_VERSION, dtype=torch.int64)
    for span in spans:
        versions[span.start : span.end] = span.version
    return versions


def _next_loss_version(versions: Tensor, loss_mask: Tensor) -> Tensor:
    """i64[T]: at t, the version of the first loss token from t on; NO_VERSION after the last."""
    size = len(versions)
    places = torch.where(loss_mask, torch.arange(size), size)
    following = places.flip(0).cummin(0).values.flip(0)
    return torch.cat([versions, versions.new_tensor([NO_VERSION])])[following]


def _pairs(spans: Iterable[VersionSpan]) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in spans]
