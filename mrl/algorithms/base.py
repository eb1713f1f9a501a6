"""The interface of an algorithm: three pure functions in a module that is found by its name.

Dimensions: G samples of a group, S sequences of the step, N packed tokens of a micro-batch, B its
sequences. Code that algorithms share is in the other files of this folder: `advantages`,
`aggregation`, `ratio_loss`, `corrections`, `kl`, `gae`, `value_loss`.
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
    """The part of an algorithm that packing needs: the weight of each sequence."""

    def sequence_weights(
        self,
        num_loss_tokens: Tensor,
        num_loss_tokens_total: int,
        num_samples_total: int,
        config: AlgorithmConfig,
        max_response_len: int,
    ) -> Tensor:
        """Return f32[S]: the weight of each sequence in the loss, already divided by the global
        normaliser.

        `num_loss_tokens` is i64[S]. `num_loss_tokens_total` and `num_samples_total` count over the
        optimizer step on all data-parallel ranks; samples without a loss token are not counted and
        get weight 0. `max_response_len` is `rollout.max_response_len`, by which some aggregations
        divide.
        """
        ...


class Algorithm(SequenceWeights, Protocol):
    """An algorithm: a module with these functions, such as `mrl/algorithms/gspo.py`. It keeps no
    state.

    A module may also have the attributes that `traits` reads, and these functions:

    `nll_weights(num_loss_tokens i64[S], rewards f32[S], config) -> f32[S]`: the weight of each
    sequence's log-likelihood term, which is added to the policy loss (`MicroBatch.nll_weight`).
    `token_advantages(values, sequence_rewards, token_penalties, batch, config)`: replaces
    `mrl.algorithms.gae.token_advantages`.
    `turn_rewards(rewards, config)`: transforms the turn rewards of a group's samples (f32[turns]
    for each sample) if `algorithm.turn_rewards` is set. Without this function the turn rewards are
    used unchanged.
    """

    def advantages(self, rewards: Sequence[Tensor], config: AlgorithmConfig) -> list[Tensor]:
        """Turn the f32[G] rewards of every group of the step into f32[G] advantages, in the same
        order.

        Samples without a reward (NaN) get advantage 0 and are left out of the group's mean and std.
        An algorithm with a critic returns the rewards themselves, and training ignores the result:
        token advantages are computed from `MicroBatch.rewards` and the critic's values. If the
        algorithm sets `WHITENS`, the training loop then normalises the advantages over the loss
        tokens of the step.

        Raises ValueError on an infinite reward.
        """
        ...

    def loss(self, logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> LossOutput:
        """Compute the loss sum of a micro-batch from the current log-probs f32[N], which have a
        gradient.

        The result is a weighted sum over sequences and is not normalised afterwards, so every split
        of the step into micro-batches must give the same total loss and gradient.

        Raises ValueError if `batch` lacks a tensor that the algorithm needs.
        """
        ...


@dataclass(frozen=True)
class Traits:
    """Properties of an algorithm that the training loop needs, read from the attributes of its
    module. Each field names the attribute."""

    needs_critic: bool
    """`NEEDS_CRITIC`, by default False: whether token advantages come from a critic's values."""
    needs_old_logprobs: bool
    """`NEEDS_OLD_LOGPROBS`, by default True: whether the trainer computes log-probs in a pass
    before the update."""
    corrects_rollout: bool
    """`CORRECTS_ROLLOUT`, by default False: whether the loss weights tokens by
    `exp(old log-prob - rollout log-prob)` even if `algorithm.importance` is `none`."""
    whitens: bool
    """`WHITENS`, by default False: whether the training loop subtracts from the advantages their
    mean over the loss tokens of the step, and divides them by their std. For algorithms that read
    `algorithm.whiten`, that key overrides the attribute."""
    sequence_range: tuple[float, float] | None
    """(`CLIP_LOW`, `CLIP_HIGH`) if `RATIO = "sequence"`: how far the ratio may fall below 1 and
    rise above 1; inf for a missing attribute. None for token ratios."""
    clip_high: float | None
    """`CLIP_HIGH`: the published upper clip range; None if unknown."""
    replaces_gae: bool
    """`token_advantages`: the module computes them by its own function. Otherwise PPO's published
    lambdas apply."""
    reads: frozenset[str] | None
    """`READS`: the fields of AlgorithmConfig that the algorithm reads, among the fields that not
    every algorithm reads. None if unknown; then the recipe's fields are not checked."""


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
        replaces_gae=hasattr(algorithm, "token_advantages"),
        reads=None if reads is None else frozenset(reads),
    )


def _range(algorithm: Algorithm) -> tuple[float, float]:
    return getattr(algorithm, "CLIP_LOW", math.inf), getattr(algorithm, "CLIP_HIGH", math.inf)


def or_default(configured: T | None, published: T) -> T:
    """Return the configured value, or the published default if the configured value is None."""
    return published if configured is None else configured
