"""Check an update between the backward pass and the optimizer step, before any weight changes.

A guard looks for samples whose log-probs, losses or gradients are not finite. In the first update
of a rollout, the policy still has the weights that computed `old_logprobs`, so every importance
ratio should be 1, and the guard measures the deviation from 1. In the first update after a start,
too large a deviation ends the run (`guards.ratio_tolerance`). For algorithms that clip sequence
ratios (GSPO: a range of 3e-4), the guard also measures how much of the clip range numerical noise
uses up. With `guards.min_ess`, it measures the effective sample size of the importance weights.

N packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.base import Algorithm, or_default, traits
from mrl.config import AlgorithmConfig, GuardConfig
from mrl.diagnosis.mismatch import effective_size
from mrl.errors import NotFinite, RunFailed
from mrl.kernels import seq_logratio
from mrl.system.histogram import log_histogram
from mrl.types import LossOutput, Max, Mean, MicroBatch, Quantiles, Statistics
from parallel.forward import LossFunction
from parallel.layer_hooks import named
from parallel.reduce import merge, reduce_statistics

QUANTILE = "guard/ratio_error_quantile"


class LowEss(RunFailed):
    """The effective sample size of an optimizer step is below `guards.min_ess`."""


@dataclass
class UpdateGuard:
    """A guard of one optimizer step on one rank.

    Wrap the loss of the step with `watch`, and call `check` after the backward pass.
    """

    step: int
    same_weights: bool
    """Whether `old_logprobs` come from the current weights. If so, the guard measures the
    difference between `old_logprobs` and the log-probs of this step."""
    clip: float | None
    """The distance from 1 to the nearer bound of the clip range, for algorithms that clip one ratio
    per sequence; None for other algorithms."""
    quantile: float = 1.0
    """`guards.ratio_quantile`, from 0 to 1: which quantile of `|logp - old|` over the tokens the
    guard reports (see `drift`)."""
    judge: Callable[[dict[str, float]], None] | None = None
    """A function that `check` calls with the metrics `guard/*` over all ranks, and that may raise an
    error. None for every update but the policy's first one after a start."""
    what: str = "log-probs"
    """The name, in messages, of the tensor from which the loss is computed."""
    rows: Sequence[str] | None = None
    """Names of the samples for error messages; None for samples of a rollout, which are named by
    their numbers."""
    min_ess: float | None = None
    """`guards.min_ess`; None if the effective sample size is not measured."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics `guard/*` over all ranks, set by `check`."""
    ess: float | None = None
    """The effective sample size over all ranks as a share of the loss tokens, set by `check`;
    None without `min_ess`."""
    _bad: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    """Tuples (name of a tensor, sample ids i64[B], bool[B] that is true for samples in which the
    tensor is not finite)."""
    _drift: list[Statistics] = field(default_factory=list)
    _weights: list[Statistics] = field(default_factory=list)

    def watch(self, loss: LossFunction) -> LossFunction:
        """Return a function that calls `loss`, and lets the guard observe the log-probs, the loss
        and the gradient."""

        def watched(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
            output = loss(logprobs, batch)
            now = logprobs.detach()
            self._note(self.what, batch, now)
            self._note("losses", batch, output.loss_sum.detach().expand(len(now)))
            if logprobs.requires_grad:
                logprobs.register_hook(lambda grad: self._note("gradients", batch, grad))
            if self.same_weights:
                self._drift.append(drift(now, batch, self.clip, self.quantile))
            if self.min_ess is not None:
                self._weights.append(importance_weights(now, batch))
            return output

        return watched

    def check(self) -> None:
        """Check what `watch` observed and set `metrics` and `ess`. A collective.

        All ranks raise the same error: NotFinite if a sample of any rank has a log-prob, loss or
        gradient that is not finite, LowEss if the effective sample size is below `min_ess`, or the
        error that `judge` raises.
        """
        found = [
            (what, number)
            for what, ids, bad in self._bad
            for number in ids[bad.to(ids.device)].tolist()
        ]
        raise_not_finite(self.step, found, self.rows)
        self.metrics = reduce_statistics(merge(self._drift)) if self.same_weights else {}
        if self.judge is not None:
            self.judge(self.metrics)
        if self.min_ess is not None:
            self.ess = _effective_size(self._weights)
            if not self.ess >= self.min_ess:
                raise LowEss(f"the effective sample size is {self.ess:.3g} of the loss tokens")

    def _note(self, what: str, batch: MicroBatch, values: Tensor) -> None:
        assert batch.sample_ids is not None
        self._bad.append((what, batch.sample_ids, not_finite(values, batch)))


def raise_not_finite(
    step: int, found: Sequence[tuple[str, int]], rows: Sequence[str] | None = None
) -> None:
    """Raise NotFinite on every rank if `found` is not empty on any rank. A collective.

    found: pairs (name of a tensor, id of a sample in which the tensor is not finite). rows: names
    of the samples for the message; by default, samples are named by their numbers in the rollouts
    of `step`.
    """
    everyone: list[Sequence[tuple[str, int]]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(set(found)))
    bad = sorted({pair for part in everyone for pair in part})
    if not bad:
        return
    # A loss is one number for its micro-batch, so it is reported only if nothing names the samples.
    finer = [pair for pair in bad if pair[0] != "losses"] or bad
    kinds = ", ".join(dict.fromkeys(what for what, _ in finer))
    ids = sorted({number for _, number in finer})
    if rows is not None:
        raise NotFinite(f"{kinds} are not finite in the rows {named([rows[i] for i in ids])}")
    raise NotFinite(
        f"step {step}: {kinds} are not finite in samples {named(ids)} (counted from 0 in "
        f"rollouts/step_{step:06d}.jsonl)"
    )


def not_finite(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return bool[B]: whether a sequence has a loss token with a NaN or infinity in `values`, f[N]."""
    lengths = batch.cu_seqlens.diff().long()
    bad = (~values.isfinite() & batch.loss_mask).int()
    sequence = torch.arange(len(lengths), device=bad.device).repeat_interleave(
        lengths, output_size=len(bad)
    )
    return (
        torch.zeros(len(lengths), dtype=bad.dtype, device=bad.device)
        .index_add(0, sequence, bad)
        .bool()
    )


def drift(
    logprobs: Tensor, batch: MicroBatch, clip: float | None, quantile: float = 1.0
) -> Statistics:
    """Measure the differences between two passes with the same weights.

    Below, logp is `logprobs`, old is `batch.old_logprobs`, rollout is `batch.rollout_logprobs`, and
    mean_t is the mean over the loss tokens of a sequence.

    `guard/ratio_error` is the largest `|logp - old|` of a loss token, and
    `guard/ratio_error_quantile` is the quantile `quantile` of `|logp - old|` over all loss tokens
    (accurate to 2.2%; NaN counts as the largest). With `clip`, `guard/clip_budget` is the mean over
    sequences of `|mean_t(logp - old)| / clip`, and `guard/clip_budget_rollout` is the mean of
    `|mean_t(old - rollout)| / clip`. The latter is the share of the clip range that the mismatch
    with the engine would take if the engine's log-probs served as the old log-probs. Without
    `old_logprobs` there was no pass before this one: `logprobs` take their place, and
    `guard/clip_budget_rollout` is the only statistic.
    """
    stats: Statistics = {}
    old = batch.old_logprobs
    if old is not None:
        # Indexing by a mask would make the host wait for the device.
        apart = torch.where(batch.loss_mask, (logprobs - old).abs(), 0.0)
        stats["guard/ratio_error"] = Max(apart.max())
        histogram = log_histogram(apart, batch.loss_mask)
        stats[QUANTILE] = Quantiles(histogram, ((QUANTILE, quantile),))
    if clip is None:
        return stats
    pairs = {
        "guard/clip_budget_rollout": (logprobs if old is None else old, batch.rollout_logprobs)
    }
    if old is not None:
        pairs["guard/clip_budget"] = (logprobs, old)
    for key, (a, b) in pairs.items():
        total, count = seq_logratio(a, b, batch.loss_mask, batch.cu_seqlens).unbind(1)
        some = count > 0
        used = torch.where(some, total / count, 0.0).abs().sum() / clip
        stats[key] = Mean(used, some.sum().double())
    return stats


def importance_weights(logprobs: Tensor, batch: MicroBatch) -> Statistics:
    """Return the statistics `w` and `w2`, the means of w and w^2 over the loss tokens.

    The weight of a token is `w = exp(logp - rollout)`, from its current and its rollout log-prob.
    """
    apart = logprobs.double() - batch.rollout_logprobs.double()
    weights = torch.where(batch.loss_mask, apart.exp(), 0.0)
    count = batch.loss_mask.sum()
    return {"w": Mean(weights.sum(), count), "w2": Mean(weights.square().sum(), count)}


def _effective_size(weights: list[Statistics]) -> float:
    """Compute the effective sample size over all ranks, as a share of the loss tokens. A collective."""
    moments = reduce_statistics(merge(weights))
    return effective_size(moments["w"], moments["w2"])


def check_first_update(
    metrics: dict[str, float], config: GuardConfig, dtype: torch.dtype, warn: Callable[[str], None]
) -> None:
    """Check, in the first update after a start, that two passes with the same weights agree.

    metrics: the metrics of `drift` over all ranks. The tolerance applies to a high quantile of the
    differences, not to the largest one, because GPU kernels that add in no fixed order can change a
    single token a lot if two experts are nearly tied for it. A fault, such as dropout or routes
    that only one pass replays, changes many tokens.

    Raises RunFailed if that quantile is above `guards.ratio_tolerance`, or if any difference is not
    finite. Calls `warn(text)` if `guard/clip_budget` is above `guards.clip_budget`.
    """
    tolerance = config.ratio_tolerance or (1e-4 if dtype == torch.float32 else 0.1)
    largest = metrics.get("guard/ratio_error", 0.0)
    error = metrics.get(QUANTILE, 0.0)
    if not (error <= tolerance and math.isfinite(largest)):
        raise RunFailed(
            "two passes of the trainer over the same weights disagree in the tokens' log-probs: by "
            f"{error:.3g} or more in {1 - config.ratio_quantile:.2%} of the tokens "
            f"(guards.ratio_quantile={config.ratio_quantile:g}), at most by {largest:.3g}, and "
            f"guards.ratio_tolerance={tolerance:g}: ratios would be off before the policy has learned "
            "anything; look for routes that are replayed in one pass only, dropout, or kernels that "
            "are not deterministic"
        )
    budget = metrics.get("guard/clip_budget", 0.0)
    if budget > config.clip_budget:
        warn(
            f"{budget:.0%} of the clip range is the trainer's own noise before the first update "
            f"(guards.clip_budget={config.clip_budget:g}): sequences will clip before the policy has "
            "learned anything"
        )


def check_finite(
    step: int, what: str, batches: Sequence[MicroBatch], outputs: Sequence[Tensor]
) -> None:
    """Raise NotFinite if an output of a pass is not finite at a loss token. A collective.

    outputs: f32[N] for each of `batches`; an empty list on ranks without outputs. what: the name of
    the outputs in the message.
    """
    found = []
    for batch, values in zip(batches, outputs, strict=False):
        assert batch.sample_ids is not None
        bad = not_finite(values.cpu(), batch)
        found += [(what, number) for number in batch.sample_ids[bad].tolist()]
    raise_not_finite(step, found)


def sequence_clip(algorithm: Algorithm, config: AlgorithmConfig) -> float | None:
    """Return how far the importance ratio of a sequence may move from 1, in the narrower direction,
    before the algorithm clips it.

    Returns None for an algorithm that does not clip sequence ratios.
    """
    published = traits(algorithm).sequence_range
    if published is None:
        return None
    low, high = published
    return min(or_default(config.clip_low, low), or_default(config.clip_high, high))
