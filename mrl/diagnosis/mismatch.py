"""How far the trainer is from the engine before the update, on the tokens of the loss.

d = old_logprobs - rollout_logprobs of a token: log p/q with p the trainer's distribution and q the one
that the engine says it sampled from. All estimates are means over the rollout's own tokens, which came
from q. Every statistic is a sum, a largest value or a histogram: no micro-batch waits for the device.

N packed tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrl.system.histogram import log_histogram
from mrl.types import Max, Mean, MicroBatch, Quantiles, Statistics
from parallel.forward import PassOutput
from parallel.reduce import merge

EXTREME = 2.0
"""A token is extreme where p/q is above this or below its inverse."""
PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999))


def mismatch_statistics(
    batches: Sequence[MicroBatch], output: PassOutput, version: int
) -> Statistics:
    """Measure `mismatch/*`, `entropy` and `staleness/*` of this rank in the pass before the update.

    `version`: of the trainer's weights. Empty where this rank holds no log-probs.
    """
    parts: list[Statistics] = []
    for batch, old, entropy in zip(batches, output.logprobs, output.entropies, strict=False):
        mask = batch.loss_mask.to(old.device)
        parts.append(
            {
                **gap_statistics(old, batch.rollout_logprobs.to(old.device), mask),
                **_staleness(batch, version),
                "entropy": Mean(_sum(entropy, mask), mask.sum()),
            }
        )
    return merge(parts)


def gap_statistics(old: Tensor, rollout: Tensor, mask: Tensor) -> Statistics:
    """Log-probs f32[N] of trainer and engine, bool[N] -> `mismatch/*`.

    k1 = -d and k3 = exp(d) - 1 - d estimate KL(q || p) (Schulman 2020, "Approximating KL divergence"):
    k1 may be negative, k3 never is and has less variance. chi2 = (exp(d) - 1)^2 estimates the
    chi-square divergence of p from q, which large ratios rule. Percentiles are of |d|, right to 2%.
    """
    d = torch.where(mask, old.double() - rollout.double(), 0.0)
    size, count = d.abs(), mask.sum()
    largest = torch.cat([size, size.new_zeros(1)]).amax()
    reported = tuple((f"mismatch/{name}", q) for name, q in PERCENTILES)
    return {
        "mismatch/logprob_abs_mean": Mean(size.sum(), count),
        "mismatch/logprob_abs_max": Max(largest),
        "mismatch/k1": Mean(-d.sum(), count),
        "mismatch/k3": Mean((d.expm1() - d).sum(), count),
        "mismatch/chi2": Mean(d.expm1().square().sum(), count),
        "mismatch/extreme_share": Mean(is_extreme(d).sum(), count),
        "mismatch/percentiles": Quantiles(log_histogram(size, mask), reported),
    }


def effective_share(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `mismatch/ess` of the reduced `mismatch/*`; nothing where there are none. Its weights are
    w = exp(d) = p/q."""
    if "mismatch/chi2" not in metrics:
        return {}
    mean = 1 + metrics["mismatch/k3"] - metrics["mismatch/k1"]
    square = metrics["mismatch/chi2"] + 2 * mean - 1
    return {"mismatch/ess": effective_size(mean, square)}


def effective_size(mean: float, mean_square: float) -> float:
    """Return mean(w)^2 / mean(w^2): the effective sample size of weights (Kish 1965) over their number.

    It is 1 where all weights are equal, and near 0 where a few tokens carry all of the weight, which
    precedes a collapse (VCPO, arXiv 2602.17616).
    """
    return mean * mean / mean_square if mean_square else 0.0


def is_extreme(d: Tensor) -> Tensor:
    """bool, as d: the ratio exp(d) is outside [1 / EXTREME, EXTREME]."""
    return d.abs() > math.log(EXTREME)


def _staleness(batch: MicroBatch, version: int) -> Statistics:
    """Versions that lie between the weights that sampled a loss token and those that learn from it."""
    versions = batch.weight_versions
    if versions is None:
        return {}
    age = torch.where(batch.loss_mask & (versions >= 0), version - versions, 0)
    return {
        "staleness/mean": Mean(age.sum(), (batch.loss_mask & (versions >= 0)).sum()),
        "staleness/max": Max(torch.cat([age, age.new_zeros(1)]).amax()),
    }


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).double().sum()
