"""Find stale rows of routes: rows that were computed with other weights than those that sampled the
next loss token.

Row r holds the experts of token r, whose forward pass predicts token r + 1. Row r is stale if its
weight version differs from the version that sampled the first loss token after token r. This rule
also covers prompts and tool outputs: most of their rows predict no loss token, but every later loss
token attends to them. A row after the last loss token is never stale.

Stale rows are not replayed, because the replay would not reproduce the pass that sampled the loss
token. Instead, the trainer's router chooses the experts. If routes are replayed, the token that a
stale row predicts is also excluded from the loss.

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
"""Stands for an unknown weight version: no `VersionSpan` covers the token or row."""


def stale_rows(sample: Sample) -> Tensor | None:
    """Return bool[T-1], true for the stale rows of a sample's routes. A row is stale if it was
    computed with other weights than those that sampled the next loss token. Return None if no row is
    stale, or if the sample has no routes.

    Raises ValueError if the sample has routes and a loss token that no span of
    `Sample.weight_versions` covers.
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
    """Exclude tokens from the samples' loss masks: every token that a stale row (see `stale_rows`)
    predicts.

    Returns the samples with the changed loss masks, and the result of `stale_rows` for each sample.
    Raises ValueError if a sample with routes has a loss token that no span of
    `Sample.weight_versions` covers.
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
    """Return the metrics `routing/stale_rows`, `routing/cached_rows` and `routing/recomputed_rows`:
    numbers of rows, summed over `samples`.

    stale: the result of `stale_rows` for each sample. Cached rows came from the engine's prefix
    cache. Recomputed rows were computed again after the engine had retracted the request.
    """
    traces = [sample.routing for sample in samples if sample.routing is not None]
    return {
        "routing/stale_rows": float(sum(int(rows.sum()) for rows in stale if rows is not None)),
        "routing/cached_rows": float(sum(trace.num_cached_rows for trace in traces)),
        "routing/recomputed_rows": float(sum(trace.num_recomputed_rows for trace in traces)),
    }


def _per_position(spans: Iterable[VersionSpan], size: int) -> Tensor:
    """Return i64[size]: for each position the version of the span that covers it, or NO_VERSION if
    no span covers it."""
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
