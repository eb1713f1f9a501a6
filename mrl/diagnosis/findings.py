"""Explain the mismatch between engine and trainer in one step by a list of findings.

The first finding is the diagnosis. Causes come before descriptions, and within each of these groups the
most severe finding comes first. If no detector finds a cause, one more finding judges the mismatch as
a whole. If its verdict is that nothing is wrong, it comes first.
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
"""A mean `|old - rollout|` of at most this is negligible: two correct float32 implementations may
differ by as much."""
JUMP = 10.0
"""A mismatch that is more than this many times the run's usual mismatch is not noise."""
NOISE_SHARE = 0.3
"""The finding `noise` is ranked as if it explained this share of the squared mismatch. A description
that explains a larger share is listed before `noise`."""
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
    """The usual mismatch `|old - rollout|` of a run, for comparison with one step."""

    mean: float
    """The metric `mismatch/logprob_abs_mean` is the mean mismatch of a step's tokens. This value is
    the median of the metric over all other steps of the run."""
    median: float
    """The metric `mismatch/p50` is the median mismatch of a step's tokens. This value is the median
    of the metric over all other steps of the run."""


def usual_mismatch(rows: Iterable[Mapping[str, Any]], step: int) -> Usual | None:
    """Compute the usual mismatch from all rows of metrics.jsonl except the row of `step`.

    Returns None if no other row has `mismatch/logprob_abs_mean`, or none has `mismatch/p50`.
    """
    others = [row for row in rows if row["step"] != step]
    found = []
    for key in ("mismatch/logprob_abs_mean", "mismatch/p50"):
        known = [row[key] for row in others if is_number(row.get(key))]
        if not known:
            return None
        found.append(statistics.median(known))
    return Usual(*found)


def find(record: TokenRecord, usual: Usual | None = None) -> list[Finding]:
    """Return all findings about a token record. There is at least one; the first is the diagnosis.

    usual: the usual mismatch of the run; None if unknown.
    """
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
    """Return the finding about a mismatch for which no detector found a cause.

    The finding is `nothing_wrong`, `stale_weights`, `noise` or `unexplained`. usual: the usual
    mismatch of the run; None if unknown. spread: whether the mismatch is spread over samples,
    rather than mostly in one sample.
    """
    mean, median = tokens.mean_abs, float(tokens.d.abs().median())
    has_routes = tokens.record.expert_ids is not None
    numbers = f"mean |old - rollout| is {mean:.2g} over {len(tokens.d)} loss tokens"
    if mean <= NEGLIGIBLE:
        return Finding("nothing_wrong", 0.0, f"{numbers}: two float32 engines that agree")
    # Other weights change every token and thus the median; a few extreme tokens change only the mean.
    jumped = usual is not None and mean > JUMP * usual.mean and median > JUMP * usual.median
    if usual is not None and jumped and spread:
        # Kernels, dtype and model are the same in all steps of a run.
        times = f"{mean / usual.mean:.0f} times" if usual.mean else "far above"
        more = ", expert, temperature or shift of routes" if has_routes else " or temperature"
        return Finding(
            "stale_weights",
            tokens.severity(1.0),
            f"{numbers}, {times} what is usual in this run, and no sample{more} stands out: the engine "
            "does not hold the trainer's weights, of the whole model"
            + " or outside its experts"
            * has_routes,
            {"usual": usual.mean},
            is_cause=True,
        )
    if mean <= 3 * HALF_PRECISION_GAP:
        return Finding(
            "noise",
            tokens.severity(NOISE_SHARE),
            f"{numbers}, spread over tokens{', layers and experts' * has_routes}: what half precision "
            f"or other kernels leave (about {HALF_PRECISION_GAP:g} in bfloat16)",
        )
    return Finding(
        "unexplained",
        tokens.severity(1.0),
        f"{numbers}, more than half precision leaves, and no detector knows its pattern",
    )
