"""The interface of an algorithm: a module with three pure functions.

Code that algorithms share is in other modules of this package: `advantages`, `aggregation`,
`ratio_loss`, `corrections`, `kl`, `gae`, `value_loss`.

Dimensions: G samples of a group, S sequences of the step, N packed tokens and B sequences of a
micro-batch.
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
    """The part of an algorithm that is needed to pack micro-batches."""

    def sequence_weights(
        self,
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor:
        """Return f32[S]: the weight of each sequence in the loss, already divided by the global
        normaliser; 0 for a sequence without a loss token.

        num_loss_tokens: i64[S], the number of loss tokens of each sequence.
        num_loss_tokens_total: the number of loss tokens in the optimizer step, on all data-parallel
        ranks.
        num_samples_total: the number of samples with at least one loss token in the optimizer step,
        on all data-parallel ranks.
        max_response_len: `rollout.max_response_len`, by which some aggregations divide.
        """
        ...


class Algorithm(SequenceWeights, Protocol):
    """An algorithm: a stateless module with the functions of this class, such as
    `mrl/algorithms/gspo.py`.

    A module may also have the attributes that `traits` reads, and these functions:

    `nll_weights(num_loss_tokens i64[S], rewards f32[S], config) -> f32[S]`: computes the weight of
    each sequence in a log-likelihood term of the loss. `loss` finds it in `MicroBatch.nll_weight`.
    `token_advantages(values, sequence_rewards, token_penalties, batch, config)`: replaces
    `mrl.algorithms.gae.token_advantages`.
    `turn_rewards(rewards, config)`: transforms the turn rewards of a group (f32[turns] for each
    sample) if `algorithm.turn_rewards` is set. Without this function they are used unchanged.
    """

    def advantages(self, rewards: Sequence[Tensor], config: AlgorithmConfig) -> list[Tensor]:
        """Turn the f32[G] rewards of every group of the step into f32[G] advantages, in the same
        order.

        Samples without a reward (NaN) get advantage 0 and are left out of the group's mean and std.
        For an algorithm with a critic, training ignores the result and computes token advantages
        from `MicroBatch.rewards` and the critic's values. If the algorithm sets `WHITENS`, the
        training loop then normalises the advantages over the loss tokens of the step.

        Raises ValueError for an infinite reward.
        """
        ...

    def loss(self, logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        """Compute the loss of a micro-batch: a sum over its sequences, weighted by
        `batch.seq_weight`.

        logprobs: f32[N] with gradient, the current policy's log-probs. The training loop only adds
        up the losses of the micro-batches, so every split of the step into micro-batches must give
        the same total loss and gradient.

        Raises ValueError if `batch` lacks a tensor that the algorithm needs.
        """
        ...


@dataclass(frozen=True)
class Traits:
    """Properties of an algorithm that the training loop needs. The docstring of each field names
    the attribute in the algorithm's module that sets the field."""

    needs_critic: bool
    """`NEEDS_CRITIC`, by default False: whether token advantages come from a critic's values."""
    needs_old_logprobs: bool
    """`NEEDS_OLD_LOGPROBS`, by default True: whether the trainer computes `MicroBatch.old_logprobs`
    in a forward pass before the update."""
    corrects_rollout: bool
    """`CORRECTS_ROLLOUT`, by default False: whether the loss weights tokens by
    `exp(old log-prob - rollout log-prob)` even if `algorithm.importance` is `none`."""
    whitens: bool
    """`WHITENS`, by default False: whether the training loop normalises the advantages by their mean
    and std over the loss tokens of the step. If the recipe sets `algorithm.whiten`, that value
    applies instead."""
    sequence_range: tuple[float, float] | None
    """`CLIP_LOW` and `CLIP_HIGH` if the module has `RATIO = "sequence"`: how far the ratio of a
    sequence may fall below 1 and rise above 1. A missing attribute counts as inf. None for an
    algorithm with a ratio per token."""
    clip_high: float | None
    """`CLIP_HIGH`: how far the published clip range extends above 1; None if the module does not
    have the attribute."""
    replaces_gae: bool
    """Whether the module has its own function `token_advantages`. Otherwise token advantages are
    computed by GAE with PPO's lambdas if the algorithm has a critic, and by `gae.monte_carlo` if it
    has none."""
    reads: frozenset[str] | None
    """`READS`: the fields of AlgorithmConfig that this algorithm reads and some other algorithms do
    not. None if the module does not have the attribute; then a recipe may set fields that the
    algorithm does not read."""


def traits(algorithm: Algorithm) -> Traits:
    """Read the optional attributes of an algorithm's module, or use their defaults."""
    reads = getattr(algorithm, "READS", None)
    is_sequence = getattr(algorithm, "RATIO", "token") == "sequence"
    return Traits(
        needs_critic=getattr(algorithm, "NEEDS_CRITIC", False),
        needs_old_logprobs=getattr(algorithm, "NEEDS_OLD_LOGPROBS", True),
        corrects_rollout=getattr(algorithm, "CORRECTS_ROLLOUT", False),
        whitens=getattr(algorithm, "WHITENS", False),
        sequence_range=_range(algorithm) if is_sequence else None,
        clip_high=getattr(algorithm, "CLIP_HIGH", None),
        replaces_gae=hasattr(algorithm, "token_advantages"),
        reads=None if reads is None else frozenset(reads),
    )


def _range(algorithm: Algorithm) -> tuple[float, float]:
    return getattr(algorithm, "CLIP_LOW", math.inf), getattr(algorithm, "CLIP_HIGH", math.inf)


def or_default(configured: T | None, published: T) -> T:
    """Return the configured value, or the published default if the configured value is None."""
    return published if configured is None else configured
