"""The losses that a training loop outside of mrl can choose by name.

The loop sends a factor for each token and a weight for each sequence. The loss reads the factors
from `MicroBatch.token_advantages`. Each loss is a sum over loss tokens; it is not divided by the number
of tokens or samples.

Below, A_t is the advantage of token t, w_t its weight, logp its log-prob and old the log-prob with
which it was sampled; `r_t = exp(logp - old)`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms import cispo, nll, ppo
from mrl.algorithms.ratio_loss import ppo_clip, ratio_loss
from mrl.config import AlgorithmConfig
from mrl.kernels import Clip
from mrl.types import LossOutput, Mean, MicroBatch

GSPO_LOW = GSPO_HIGH = 0.2
"""The clip range of `gspo` here. GSPO's own, 3e-4, is for log-probs of the trainer; here `old` is the
engine's, which differs by more."""
DRO_BETA = 0.05
MAX_RATIO = 2.0
"""The bound of the ratio in `stable_reinforce`."""


@dataclass(frozen=True)
class LossOptions:
    """The options of a loss in a request."""

    algorithm: AlgorithmConfig = AlgorithmConfig()  # noqa: RUF009  (it is frozen)
    """`clip_low`, `clip_high` and `dual_clip`."""
    beta: float = DRO_BETA
    kl_coeff: float = 0.0


@dataclass(frozen=True)
class NamedLoss:
    """A loss function, the name of its per-token factors in a request, and its options."""

    loss: Callable[[Tensor, MicroBatch, LossOptions], LossOutput]
    factors: str
    """The name of the per-token factors in a request: `weights` or `advantages`."""
    options: tuple[str, ...] = ()
    """The options that a request may set: fields of LossOptions or of its `algorithm`."""

    @property
    def is_ratio(self) -> bool:
        """Whether the loss needs the tokens' log-probs from the time when they were sampled."""
        return self.factors == "advantages"


def linear(logprobs: Tensor, batch: MicroBatch, options: LossOptions) -> LossOutput:
    """Return the sum of `w_t logp`. With the gradients of a loss of the client's as weights, it has
    the gradients of that loss."""
    return LossOutput(-nll.loss(logprobs, batch, options.algorithm).loss_sum)


def _published(
    loss: Callable[[Tensor, MicroBatch, AlgorithmConfig], LossOutput],
) -> Callable[[Tensor, MicroBatch, LossOptions], LossOutput]:
    """Return the loss of one of mrl's algorithms as a loss with options."""
    return lambda logprobs, batch, options: loss(logprobs, batch, options.algorithm)


def importance_sampling(logprobs: Tensor, batch: MicroBatch, options: LossOptions) -> LossOutput:
    """Return the sum of `-r_t A_t`. Raises ValueError without `old_logprobs`."""
    return ratio_loss(logprobs, batch, options.algorithm, ratio="token", clip=Clip("none"))


def gspo(logprobs: Tensor, batch: MicroBatch, options: LossOptions) -> LossOutput:
    """Return the sum of `-min(s A_t, clip(s) A_t)`, where s is the exponential of the mean of `logp -
    old` over the loss tokens of a sequence, with the gradient of GSPO-token (arXiv 2507.18071)."""
    lengths = batch.cu_seqlens.diff().long()
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=batch.num_tokens
    )
    counts = torch.zeros_like(batch.seq_weight).index_add(0, sequence, batch.loss_mask.float())
    whole = dataclasses.replace(batch, seq_weight=batch.seq_weight * counts)  # a sum, not a mean
    clip = ppo_clip(options.algorithm, GSPO_LOW, GSPO_HIGH)
    return ratio_loss(logprobs, whole, options.algorithm, ratio="sequence", clip=clip)


def dro(logprobs: Tensor, batch: MicroBatch, options: LossOptions) -> LossOutput:
    """Return the sum of `-A_t logp + beta / 2 (logp - old)^2` (DRO, arXiv 2405.19107, without its value
    function)."""
    advantages, apart, weights = _parts(logprobs, batch)
    terms = -advantages * logprobs.double() + options.beta / 2 * apart.square()
    return LossOutput(torch.where(batch.loss_mask, weights * terms, 0.0).sum())


def stable_reinforce(logprobs: Tensor, batch: MicroBatch, options: LossOptions) -> LossOutput:
    """Return the sum of `-min(r_t, MAX_RATIO) A_t logp + kl_coeff / 2 (logp - old)^2`. The bounded
    ratio is a constant in the gradient."""
    advantages, apart, weights = _parts(logprobs, batch)
    ratios = apart.detach().clamp(max=math.log(MAX_RATIO)).exp()
    terms = -ratios * advantages * logprobs.double() + options.kl_coeff / 2 * apart.square()
    mask, count = batch.loss_mask, batch.loss_mask.count_nonzero()
    cut = mask & (apart.detach() > math.log(MAX_RATIO))
    stats = {
        "ratio/mean": Mean(torch.where(mask, ratios, 0.0).sum(), count),
        "ratio/clip_frac": Mean(cut.sum().double(), count),
    }
    return LossOutput(torch.where(mask, weights * terms, 0.0).sum(), {**stats})


def _parts(logprobs: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the advantages, `logp - old`, and the weights of the sequences, f64[N] each."""
    assert batch.token_advantages is not None
    assert batch.old_logprobs is not None
    lengths = batch.cu_seqlens.diff().long()
    weights = batch.seq_weight.double().repeat_interleave(lengths, output_size=logprobs.numel())
    apart = torch.where(batch.loss_mask, logprobs.double() - batch.old_logprobs.double(), 0.0)
    return batch.token_advantages.double(), apart, weights


CLIPS = ("clip_low", "clip_high")
LOSSES: Mapping[str, NamedLoss] = {
    "cross_entropy": NamedLoss(_published(nll.loss), "weights"),
    "linear": NamedLoss(linear, "weights"),
    "importance_sampling": NamedLoss(importance_sampling, "advantages"),
    "ppo": NamedLoss(_published(ppo.loss), "advantages", (*CLIPS, "dual_clip")),
    "cispo": NamedLoss(_published(cispo.loss), "advantages", CLIPS),
    "gspo": NamedLoss(gspo, "advantages", CLIPS),
    "dro": NamedLoss(dro, "advantages", ("beta",)),
    "stable_reinforce": NamedLoss(stable_reinforce, "advantages", ("kl_coeff",)),
}
