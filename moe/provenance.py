"""Find stale rows of routes: rows whose weight version differs from the version that sampled the
next loss token.

A pass that replays a stale row would differ from the pass that sampled the token. So the trainer's
router chooses the experts of that row, and if routes are replayed, the token that the row predicts
is excluded from the loss.

Row r routes token r and predicts token r + 1. Most rows of a prompt or of a tool's output predict
no loss token, but every later loss token attends to them. Hence one rule for all rows: row r is
stale if its weight version differs from that of the first loss token after it. A row after the last
loss token is never stale.

The functions are pure and use only what every rank knows about a sample, so all ranks get the same
result.

Dimensions: T all tokens of a sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mrl.types import Sample, VersionSpan

NO_VERSION = -1
"""The version of a token or row that no span covers."""


def stale_rows(sample: Sample) -> Tensor | None:
    """Return which rows of a sample's routes are stale, bool[T-1]; None if no row is stale, or if
    the sample has no routes.

    Raises ValueError for a loss token that no span of `Sample.weight_versions` covers.
    """
    if sample.routing is None:
        return None
    rows, tokens = sample.routing.row_versions, sample.weight_versions
    num_tokens = sample.routing.num_rows + 1
    # The usual case needs no tensor: one version chose all rows and sampled all tokens.
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


def without_stale_tokens(
    samples: Sequence[Sample],
) -> tuple[list[Sample], list[Tensor | None]]:
    """Exclude the tokens that stale rows predict from the loss. Return the samples with the changed
    loss masks, and the result of `stale_rows` for each sample.

    Raises ValueError for a loss token that no span of `Sample.weight_versions` covers.
    """
    stale = [stale_rows(sample) for sample in samples]
    return [_without_tokens(s, rows) for s, rows in zip(samples, stale, strict=True)], stale


def _without_tokens(sample: Sample, stale: Tensor | None) -> Sample:
    if stale is None:
        return sample
    loss_mask = sample.loss_mask.clone()
    loss_mask[1:] &= ~stale
    return dataclasses.replace(sample, loss_mask=loss_mask)


def provenance_metrics(
    samples: Sequence[Sample], stale: Sequence[Tensor | None]
) -> dict[str, float]:
    """Return the numbers of stale, cached and recomputed rows, each summed over all samples of a
    step.

    stale: the result of `stale_rows` for each sample.
    """
    traces = [sample.routing for sample in samples if sample.routing is not None]
    return {
        "routing/stale_rows": float(sum(int(rows.sum()) for rows in stale if rows is not None)),
        "routing/cached_rows": float(sum(trace.num_cached_rows for trace in traces)),
        "routing/recomputed_rows": float(sum(trace.num_recomputed_rows for trace in traces)),
    }


def _per_position(spans: Iterable[VersionSpan], size: int) -> Tensor:
    """Return the version of each position, i64[size]; NO_VERSION outside of the spans."""
    versions = torch.full((size,), NO_VERSION, dtype=torch.int64)
    for span in spans:
        versions[span.start : span.end] = span.version
    return versions


def _next_loss_version(versions: Tensor, loss_mask: Tensor) -> Tensor:
    """Return i64[T]: for each token t the version of the first loss token at or after t; NO_VERSION
    if there is no such loss token."""
    size = len(versions)
    places = torch.where(loss_mask, torch.arange(size), size)
    following = places.flip(0).cummin(0).values.flip(0)
    return torch.cat([versions, versions.new_tensor([NO_VERSION])])[following]


def _pairs(spans: Iterable[VersionSpan]) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in spans]
