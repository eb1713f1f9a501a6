"""What is wrong between engine and trainer in one step: findings, the diagnosis first.

Causes come before descriptions, and each kind by severity. Where nothing is named, the last word says
whether the mismatch is one to worry about.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mrl.diagnosis.detectors import (
    extremes,
    not_finite,
    router,
    shifted_routes,
    stale_expert,
    stale_weights,
    temperature,
)
from mrl.diagnosis.detectors.base import HALF_PRECISION_GAP, Finding, LossTokens
from mrl.diagnosis.tokens import TokenRecord
from mrl.system.json_text import is_number

__all__ = ["DETECTORS", "NEGLIGIBLE", "Finding", "Usual", "find", "usual_mismatch"]

NEGLIGIBLE = 1e-5
"""Mean |old - rollout| of two float32 engines that do everything right: nothing to explain."""
JUMP = 10.0
"""Times the usual mismatch, and it is not the noise that it was."""
NOISE_SHARE = 0.3
"""A description goes before `noise` where it explains more of the mismatch than this."""
DETECTORS: tuple[Callable[[LossTokens], Finding | None], ...] = (
    not_finite.detect,
    shifted_routes.detect,
    temperature.detect,
    stale_expert.detect,
    stale_weights.detect,
    router.detect,
    extremes.detect_tokens,
    extremes.detect_samples,
)


@dataclass(frozen=True)
class Usual:
    """The usual mismatch is |old - rollout| in the other steps of a run."""

    mean: float
    """Median over the steps of the mean over tokens."""
    median: float
    """The median over steps of the median over tokens."""


def usual_mismatch(rows: Iterable[Mapping[str, Any]], step: int) -> Usual | None:
    """Read it from the rows of metrics.jsonl but that of `step`; None where no other has the
    numbers."""
    others = [row for row in rows if row["step"] != step]
    found = []
    for key in ("mismatch/logprob_abs_mean", "mismatch/p50"):
        known = [row[key] for row in others if is_number(row.get(key))]
        if not known:
            return None
        found.append(statistics.median(known))
    return Usual(*found)


def find(record: TokenRecord, usual: Usual | None = None) -> list[Finding]:
    """All findings, never none; the first is the diagnosis. `usual`: of the run, where it is known."""
    tokens = LossTokens(record)
    if not len(tokens.d):
        nothing = Finding("no_tokens", 0.0, "the record holds no loss token")
        return [not_finite.detect(tokens) or nothing]
    found = [finding for detect in DETECTORS if (finding := detect(tokens)) is not None]
    if not any(finding.is_cause for finding in found):
        spread = not any(finding.name == "extreme_sample" for finding in found)
        found.append(_verdict(tokens, usual, spread=spread))
    place = {"nothing_wrong": 0}
    return sorted(found, key=lambda f: (place.get(f.name, 1), not f.is_cause, -f.severity))


def _verdict(tokens: LossTokens, usual: Usual | None, *, spread: bool) -> Finding:
    """What is left to say where no cause stands out; `spread`: no single sample is behind it."""
    mean, median = tokens.mean_abs, float(tokens.d.abs().median())
    numbers = f"mean |old - rollout| is {mean:.2g} over {len(tokens.d)} loss tokens"
    if mean <= NEGLIGIBLE:
        return Finding("nothing_wrong", 0.0, f"{numbers}: two float32 engines that agree")
    # Other weights move every token; a few wild ones, as other routes make them, only the mean.
    jumped = usual is not None and mean > JUMP * usual.mean and median > JUMP * usual.median
    if usual is not None and jumped and spread:
        # Kernels, dtype and model have been the same all along.
        times = f"{mean / usual.mean:.0f} times" if usual.mean else "far above"
        return Finding(
            "stale_weights",
            tokens.severity(1.0),
            f"{numbers}, {times} what is usual in this run, and no sample, expert, temperature or "
            "shift of routes stands out: the engine does not hold the trainer's weights, of the "
            "whole model or outside its experts",
            {"usual": usual.mean},
            is_cause=True,
        )
    if mean <= 3 * HALF_PRECISION_GAP:
        return Finding(
            "noise",
            tokens.severity(NOISE_SHARE),
            f"{numbers}, spread over tokens, layers and experts: what half precision or other kernels "
            f"leave (about {HALF_PRECISION_GAP:g} in bfloat16)",
        )
    return Finding(
        "unexplained",
        tokens.severity(1.0),
        f"{numbers}, more than half precision leaves, and no detector knows its pattern",
    )
