"""What a model's head gets and returns for a micro-batch, and losses beside the algorithm's.

Dimensions: N packed tokens of a micro-batch, n rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mrl.types import MicroBatch, Statistics
from parallel.context import ContextSlice
from parallel.layers.attention import PackedSequences
from parallel.layers.output_layer import Projection
from parallel.pass_output import PassOutput


@dataclass(frozen=True)
class HeadInput:
    """The input of a head for one micro-batch."""

    states: Tensor
    """The model's output [1, n, width] for this rank's tokens. It consists of logits, of a critic's
    values, or, if there is a `projection`, of hidden states. Under sequence parallelism, hidden states
    are given only for this tensor-parallel rank's part of the tokens."""
    batch: MicroBatch
    on_cpu: MicroBatch
    """`batch` on the CPU, where reading it does not wait for a GPU."""
    context: ContextSlice
    """The part of the micro-batch's tokens that this rank has."""
    projection: Projection | None = None
    """The projection onto the vocabulary, if the model leaves it to the head."""
    packed: PackedSequences | None = None
    """What the model's layers know of the sequences of the micro-batch."""


Head = Callable[[HeadInput, PassOutput], "HeadOutput"]
"""Computes the tensors that the loss depends on: log-probs of a policy, with their entropy, or
values of a critic. It also adds its results, detached, to the PassOutput."""


@dataclass(frozen=True)
class HeadOutput:
    """The output of a head for one micro-batch."""

    result: Tensor
    """f32[N] with gradient: log-probs or values."""
    entropy: Tensor | None = None
    """f32[N] with gradient: the entropy of a policy; None for a critic."""


class ExtraLoss(Protocol):
    """A loss of training passes that is added to the algorithm's, such as that of MTP layers."""

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Prepare for the micro-batches (on the CPU) of a training pass. A collective."""
        ...

    def end_step(self) -> None:
        """Free what `begin_step` made."""
        ...

    def __call__(self, given: HeadInput) -> tuple[Tensor, Statistics]:
        """Return a micro-batch's loss, a scalar with gradient, and its statistics. It is called on
        the last pipeline stage."""
        ...
