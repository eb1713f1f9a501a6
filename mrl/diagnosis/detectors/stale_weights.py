"""Tokens that other weights sampled than the trainer now holds, by what the engine says itself."""

from __future__ import annotations

import torch

from mrl.diagnosis.detectors.base import Finding, LossTokens, excess_share
from mrl.types import UNKNOWN_VERSION


def detect(tokens: LossTokens) -> Finding | None:
    record = tokens.record
    versions = record.weight_versions[tokens.index]
    stale = (versions != record.version) & (versions != UNKNOWN_VERSION)
    if not stale.any():
        return None
    d = tokens.d.abs()
    seen, counts = torch.unique(versions[stale], return_counts=True)
    common = int(seen[counts.argmax()])
    # Where every token is stale there is nothing to compare with, and nothing else to blame.
    share = 1.0 if stale.all() else excess_share(tokens.d.square(), stale)
    rest = "" if stale.all() else f", the others {float(d[~stale].mean()):.2g}"
    return Finding(
        name="stale_weights",
        severity=tokens.severity(share),
        text=(
            f"{len(d[stale]) / len(d):.0%} of the loss tokens were sampled by older weights (mostly "
            f"version {common}; the trainer holds {record.version}): their mean |old - rollout| is "
            f"{float(d[stale].mean()):.2g}{rest}"
        ),
        where={
            "version": common,
            "versions": seen.tolist(),
            "samples": record.sample_ids[tokens.sample[stale].unique()].tolist(),
        },
        is_cause=share >= 0.5,
    )
