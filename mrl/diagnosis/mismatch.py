"""Measure how the log-probs of trainer and engine differ on the loss tokens, before the update.

For each token, `d = old_logprobs - rollout_logprobs`. This is `log(p / q)`, where p is the
trainer's distribution and q the distribution that the engine reports. All estimates are means over
the rollout's tokens, which were sampled from q. Every statistic is a sum, a maximum or a histogram
that stays on the device, so the host need not wait for the device after each micro-batch.

Dimensions: N packed tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrl.system.histogram import log_histogram
from mrl.types import Max, Mean, MicroBatch, Quantiles, Statistics
from parallel.pass_output import PassOutput
from parallel.reduce import merge

EXTREME = 2.0
"""A token is extreme if `p / q` is above EXTREME or below 1 / EXTREME."""
PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999))


def mismatch_statistics(
    batches: Sequence[MicroBatch], output: PassOutput, version: int
) -> Statistics:
    """Return this rank's statistics `mismatch/*`, `entropy` and `staleness/*`.

    output: the output of the forward pass over `batches` before the update. version: the version of
    the trainer's weights. The result is empty if this rank has no log-probs.
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
    """Return the statistics `mismatch/*` over the tokens for which `mask` is true.

    old, rollout: f32[N], the log-probs of trainer and engine. mask: bool[N].

    `k1 = -d` and `k3 = exp(d) - 1 - d` estimate KL(q || p) (Schulman 2020, "Approximating KL
    divergence"). k1 may be negative; k3 is never negative, and has less variance. `chi2 = (exp(d) -
    1)^2` estimates the chi-square divergence of p from q; large ratios dominate it. The percentiles
    of `|d|` are accurate to about 2%.
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
    """Compute the metric `mismatch/ess`, the relative effective sample size of the loss tokens.

    It is `effective_size` of the importance weights `w = exp(d) = p / q`. metrics: the metrics
    `mismatch/*` after reduction over ranks. Returns {} if they have no `mismatch/chi2`.
    """
    if "mismatch/chi2" not in metrics:
        return {}
    mean = 1 + metrics["mismatch/k3"] - metrics["mismatch/k1"]
    square = metrics["mismatch/chi2"] + 2 * mean - 1
    return {"mismatch/ess": effective_size(mean, square)}


def effective_size(mean: float, mean_square: float) -> float:
    """Return `mean(w)^2 / mean(w^2)`, the effective sample size divided by the sample size (Kish 1965).

    mean, mean_square: the means of w and of w^2 over tokens, for importance weights w. The result is
    1 if all weights are equal, and near 0 if a few tokens carry almost all of the weight. Such a low
    value precedes a collapse of the training (VCPO, arXiv 2602.17616). The result is 0 if all
    weights are 0.
    """
    return mean * mean / mean_square if mean_square else 0.0


def is_extreme(d: Tensor) -> Tensor:
    """Return, for each element of d, whether the ratio exp(d) is outside [1 / EXTREME, EXTREME]."""
    return d.abs() > math.log(EXTREME)


def _staleness(batch: MicroBatch, version: int) -> Statistics:
    """Return the statistics `staleness/*` of a micro-batch.

    The staleness of a token is `version` minus the version of the weights that sampled the token.
    The statistics are the mean and the maximum over the loss tokens whose version is known. Returns
    {} if the batch has no versions.

    version: the version of the trainer's weights.
    """
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
