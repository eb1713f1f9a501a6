"""Guards check an update between the backward pass and the optimizer, while the weights are untouched.

They look for log-probs, losses and gradients that are not finite, by sample. They check that the ratio
is one: before the first update of a rollout the policy is the one that gave `old_logprobs`, so both
passes of the trainer must agree. And they measure how much of a narrow clip range (GSPO: 3e-4) is noise
already. With `guards.min_ess` they measure the effective sample size of the importance weights.

N packed tokens of a micro-batch, B its sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.base import Algorithm, either, traits
from mrl.config import AlgorithmConfig, GuardConfig
from mrl.diagnosis.mismatch import effective_size
from mrl.errors import NotFinite, RunFailed
from mrl.kernels import seq_logratio
from mrl.system.histogram import log_histogram
from mrl.types import LossOutput, Max, Mean, MicroBatch, Quantiles, Statistics
from parallel.backward_watch import named
from parallel.forward import LossFunction
from parallel.reduce import merge, reduce_statistics

QUANTILE = "guard/ratio_error_quantile"


class LowEss(RunFailed):
    """The effective sample size of an optimizer step is below `guards.min_ess`."""


@dataclass
class UpdateGuard:
    """A guard watches one optimizer step of one rank: `watch` its loss, then `check`, a collective."""

    step: int
    same_weights: bool
    """Whether `old_logprobs` are of the present weights: then the drift of both passes is measured."""
    clip: float | None
    """The narrower side of a sequence ratio's range, where the algorithm has one."""
    quantile: float = 1.0
    """`guards.ratio_quantile`: the share of the tokens whose drift is judged."""
    judge: Callable[[dict[str, float]], None] | None = None
    """Gets `guard/*` over all ranks before the first update of a start, and may raise."""
    what: str = "log-probs"
    """What the loss is given."""
    rows: Sequence[str] | None = None
    """What names the samples where they are not of a rollout."""
    min_ess: float | None = None
    """`guards.min_ess`; None where the importance weights are not measured."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`guard/*` over all ranks, after `check`."""
    ess: float | None = None
    """The effective sample size over all ranks, after `check`."""
    _bad: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    """(what, i64[B] sample ids, bool[B])."""
    _drift: list[Statistics] = field(default_factory=list)
    _weights: list[Statistics] = field(default_factory=list)

    def watch(self, loss: LossFunction) -> LossFunction:
        """Return `loss` with its inputs, result and gradient observed."""

        def watched(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
            output = loss(logprobs, batch)
            now = logprobs.detach()
            self._note(self.what, batch, now)
            self._note("losses", batch, output.loss_sum.detach().expand(len(now)))
            if logprobs.requires_grad:
                logprobs.register_hook(lambda grad: self._note("gradients", batch, grad))
            if self.same_weights and batch.old_logprobs is not None:
                self._drift.append(drift(now, batch, self.clip, self.quantile))
            if self.min_ess is not None:
                self._weights.append(importance_weights(now, batch))
            return output

        return watched

    def check(self) -> None:
        """Raises NotFinite, on every rank, where a sample of any rank is not finite, and LowEss where
        the effective sample size is below `min_ess`."""
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
    """Raise NotFinite on every rank where any rank has `found` (what, sample id). A collective.

    `rows`: what names the samples, in place of their place in the rollouts of `step`.
    """
    everyone: list[Sequence[tuple[str, int]]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(set(found)))
    bad = sorted({pair for part in everyone for pair in part})
    if not bad:
        return
    # A loss is one number for its micro-batch: named only where nothing finer is known.
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
    """bool[B]: sequences with a loss token where f[N] is NaN or infinite."""
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
    """Measure how far two passes over the same weights are apart.

    `guard/ratio_error` is the largest |logp - old| of a token, `guard/ratio_error_quantile` what a
    share `quantile` of all tokens does not exceed (to 2.2%; NaN counts as the largest). With `clip`,
    `guard/clip_budget` is the mean over sequences of |mean_t(logp - old)| / clip, and
    `guard/clip_budget_rollout` that of old - rollout: what the engine's gap would take if its log-probs
    stood in for the old ones.
    """
    assert batch.old_logprobs is not None
    # No indexing by a mask, which would wait for the device.
    apart = torch.where(batch.loss_mask, (logprobs - batch.old_logprobs).abs(), 0.0)
    stats: Statistics = {
        "guard/ratio_error": Max(apart.max()),
        QUANTILE: Quantiles(log_histogram(apart, batch.loss_mask), ((QUANTILE, quantile),)),
    }
    if clip is None:
        return stats
    pairs = {
        "guard/clip_budget": (logprobs, batch.old_logprobs),
        "guard/clip_budget_rollout": (batch.old_logprobs, batch.rollout_logprobs),
    }
    for key, (a, b) in pairs.items():
        total, count = seq_logratio(a, b, batch.loss_mask, batch.cu_seqlens).unbind(1)
        some = count > 0
        used = torch.where(some, total / count, 0.0).abs().sum() / clip
        stats[key] = Mean(used, some.sum().double())
    return stats


def importance_weights(logprobs: Tensor, batch: MicroBatch) -> Statistics:
    """Return the mean and the mean square of exp(logp - rollout) over the loss tokens, by name."""
    apart = logprobs.double() - batch.rollout_logprobs.double()
    weights = torch.where(batch.loss_mask, apart.exp(), 0.0)
    count = batch.loss_mask.sum()
    return {"w": Mean(weights.sum(), count), "w2": Mean(weights.square().sum(), count)}


def _effective_size(weights: list[Statistics]) -> float:
    """Return the effective sample size over all ranks, as a share of the tokens. A collective."""
    moments = reduce_statistics(merge(weights))
    return effective_size(moments["w"], moments["w2"])


def check_first_update(
    metrics: dict[str, float], config: GuardConfig, dtype: torch.dtype, warn: Callable[[str], None]
) -> None:
    """Judge the drift of the first step after a start.

    A high quantile of the tokens is judged, not the largest: kernels that add in no fixed order, as
    some of a GPU do, can throw a single token far off where two experts are nearly a tie, while a fault
    (routes that are replayed in one pass only, dropout) shifts many. Raises RunFailed where the ratio
    is not 1, or not finite in any token; `warn(text)` where the clip budget is used up.
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
    """Raise NotFinite where f32[N] outputs of a pass are not finite in a loss token; `what` names them.

    A collective; ranks that have no outputs give none.
    """
    found = []
    for batch, values in zip(batches, outputs, strict=False):
        assert batch.sample_ids is not None
        bad = not_finite(values.cpu(), batch)
        found += [(what, number) for number in batch.sample_ids[bad].tolist()]
    raise_not_finite(step, found)


def sequence_clip(algorithm: Algorithm, config: AlgorithmConfig) -> float | None:
    """Return the narrower side of the range of a sequence ratio, None for an algorithm without one."""
    published = traits(algorithm).sequence_range
    if published is None:
        return None
    low, high = published
    return min(either(config.clip_low, low), either(config.clip_high, high))
