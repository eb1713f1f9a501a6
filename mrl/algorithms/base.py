"""What an algorithm is: three pure functions in one module, found by its name.

Dimensions: G samples of a group, S sequences of the step, N packed tokens of a micro-batch, B its
sequences. What algorithms share stands beside them: `advantages`, `aggregation`, `ratio_loss`,
`corrections`, `kl`, `gae`, `value_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch

T = TypeVar("T")


class SequenceWeights(Protocol):
    """Says what each sequence counts: all that packing asks of an algorithm."""

    def sequence_weights(
        self,
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor:
        """Return what each sequence counts in the loss: the whole global normaliser.

        Totals are over the optimizer step on all data-parallel ranks, and samples without a loss
        token do not count. i64[S] to f32[S]; 0 for a sequence without a loss token.
        """
        ...


class Algorithm(SequenceWeights, Protocol):
    """An algorithm is a module with these functions, as `mrl/algorithms/gspo.py` is. None keeps state.

    What else a module may have is read with `traits`, and:

    `nll_weights(num_loss_tokens i64[S], rewards f32[S], config) -> f32[S]`: what each sequence's
    log-likelihood counts beside the policy loss, as `MicroBatch.nll_weight`.
    `token_advantages(values, sequence_rewards, token_penalties, batch, config)`: in the place of
    `mrl.algorithms.gae.token_advantages`.
    `turn_rewards(rewards, config)`: what the turn rewards of a group's samples (f32[turns] each) count
    as, where `algorithm.turn_rewards` credits them; without it they count as they are.
    """

    def advantages(self, rewards: Sequence[Tensor], config: AlgorithmConfig) -> list[Tensor]:
        """Turn f32[G] rewards of each prompt's samples, all groups of the step, into f32[G] advantages.

        Samples without a reward (NaN) get advantage 0 and are left out of the group's mean and std.
        With a critic it returns the rewards themselves, and training does not read it: token advantages
        are computed from `MicroBatch.rewards`, and the baseline is subtracted token by token. What it
        returns for an algorithm that `WHITENS` is then normalised over the loss tokens of the step.
        Raises ValueError on an infinite reward.
        """
        ...

    def loss(self, logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        """Turn f32[N] current log-probs, with gradient, into the sum over sequences: never divided.

        Any split of the step into micro-batches must add up to the same loss and gradient.
        Raises ValueError where `batch` lacks a tensor that the algorithm needs.
        """
        ...


@dataclass(frozen=True)
class Traits:
    """What a loop has to know of an algorithm; each has its default where the module lacks it."""

    needs_critic: bool
    """`NEEDS_CRITIC = False`: `loss` reads `token_advantages`."""
    needs_old_logprobs: bool
    """`NEEDS_OLD_LOGPROBS = True`: the pass before the update."""
    corrects_rollout: bool
    """`CORRECTS_ROLLOUT = False`: weighs tokens by exp(old - rollout) without `importance`."""
    whitens: bool
    """`WHITENS = False`: whether the loop subtracts the mean of the advantages over the loss tokens of
    the step and divides by their std; `algorithm.whiten` replaces it where an algorithm reads that."""
    sequence_range: tuple[float, float] | None
    """(`CLIP_LOW`, `CLIP_HIGH`) where `RATIO = "sequence"`: how far below and above 1 it may go."""
    clip_high: float | None
    """`CLIP_HIGH`: the published upper clip range; None if unknown."""
    reads: frozenset[str] | None
    """`READS`: fields of AlgorithmConfig that not every algorithm reads; None: unknown, unchecked."""


def traits(algorithm: Algorithm) -> Traits:
    """Read the optional attributes of an algorithm's module."""
    reads = getattr(algorithm, "READS", None)
    is_sequence = getattr(algorithm, "RATIO", "token") == "sequence"
    return Traits(
        needs_critic=getattr(algorithm, "NEEDS_CRITIC", False),
        needs_old_logprobs=getattr(algorithm, "NEEDS_OLD_LOGPROBS", True),
        corrects_rollout=getattr(algorithm, "CORRECTS_ROLLOUT", False),
        whitens=getattr(algorithm, "WHITENS", False),
        sequence_range=_range(algorithm) if is_sequence else None,
        clip_high=getattr(algorithm, "CLIP_HIGH", None),
        reads=None if reads is None else frozenset(reads),
    )


def _range(algorithm: Algorithm) -> tuple[float, float]:
    return getattr(algorithm, "CLIP_LOW", math.inf), getattr(algorithm, "CLIP_HIGH", math.inf)


def either(configured: T | None, published: T) -> T:
    """The recipe's value, or the paper's where the recipe gives none."""
    return published if configured is None else configured
