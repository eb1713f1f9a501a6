"""The losses that a training loop outside of mrl can name: it gives a factor for each token.

Each is an algorithm's own loss over `MicroBatch.token_advantages`. Sequences count as they are given:
nothing divides by the number of tokens or samples.
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
    """A loss with what it reads of a sequence and of a request."""

    loss: Callable[[Tensor, MicroBatch, AlgorithmConfig], LossOutput]
    factors: str
    """What its factors per token are called: `weights` or `advantages`."""
    options: tuple[str, ...] = ()
    """Fields of AlgorithmConfig that a request may set."""

    @property
    def is_ratio(self) -> bool:
        """Whether it compares with the log-probs that the tokens were sampled with."""
        return self.factors == "advantages"


def importance_sampling(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
    """Sum -r_t A_t over loss tokens, with r_t = exp(logp - old) and no clip. Raises ValueError without
    `old_logprobs`."""
    return ratio_loss(logprobs, batch, config, ratio="token", clip=Clip("none"))


LOSSES: Mapping[str, NamedLoss] = {
    "cross_entropy": NamedLoss(nll.loss, "weights"),
    "importance_sampling": NamedLoss(importance_sampling, "advantages"),
    "ppo": NamedLoss(ppo.loss, "advantages", ("clip_low", "clip_high", "dual_clip")),
    "cispo": NamedLoss(cispo.loss, "advantages", ("clip_low", "clip_high")),
}
