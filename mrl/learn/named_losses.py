"""The losses that a training loop outside of mrl can choose by name.

The loop sends a factor for each token and a weight for each sequence. The loss reads the factors
from `MicroBatch.token_advantages`. The loss is a sum over tokens; it is not divided by the number
of tokens or samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mrl.algorithms import cispo, nll, ppo
from mrl.algorithms.ratio_loss import ratio_loss
from mrl.config import AlgorithmConfig
from mrl.kernels import Clip
from mrl.types import LossOutput, MicroBatch


@dataclass(frozen=True)
class NamedLoss:
    """A loss function, the name of its per-token factors in a request, and its options."""

    loss: Callable[[Tensor, MicroBatch, AlgorithmConfig], LossOutput]
    factors: str
    """The name of the per-token factors in a request: `weights` or `advantages`."""
    options: tuple[str, ...] = ()
    """The fields of AlgorithmConfig that a request may set."""

    @property
    def is_ratio(self) -> bool:
        """Whether the loss needs the tokens' log-probs from the time when they were sampled."""
        return self.factors == "advantages"


def importance_sampling(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Return the sum of `-r_t A_t` over the loss tokens, weighted by `batch.seq_weight`.

    A_t is the advantage of token t, and `r_t = exp(logp - old)` is its importance ratio, which is
    not clipped.

    Raises ValueError without `old_logprobs`.
    """
    return ratio_loss(logprobs, batch, config, ratio="token", clip=Clip("none"))


LOSSES: Mapping[str, NamedLoss] = {
    "cross_entropy": NamedLoss(nll.loss, "weights"),
    "importance_sampling": NamedLoss(importance_sampling, "advantages"),
    "ppo": NamedLoss(ppo.loss, "advantages", ("clip_low", "clip_high", "dual_clip")),
    "cispo": NamedLoss(cispo.loss, "advantages", ("clip_low", "clip_high")),
}
