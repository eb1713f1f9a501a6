"""Detect tokens that older weights sampled. The engine reports the weight version of each token."""

from __future__ import annotations

import torch

from mrl.diagnosis.detectors.base import Finding, LossTokens, excess_share
from mrl.types import UNKNOWN_VERSION


def detect(tokens: LossTokens) -> Finding | None:
    """Report the loss tokens whose weight version is known and is not the trainer's version.

    The finding is marked as a cause if these tokens explain at least half of the squared mismatch.
    """
    record = tokens.record
    versions = record.weight_versions[tokens.index]
    stale = (versions != record.version) & (versions != UNKNOWN_VERSION)
    if not stale.any():
        return None
    d = tokens.d.abs()
    seen, counts = torch.unique(versions[stale], return_counts=True)
    common = int(seen[counts.argmax()])
    # If every token is stale, there are none to compare with, and all of the mismatch counts.
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
