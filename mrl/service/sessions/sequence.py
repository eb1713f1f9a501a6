"""A sequence that a client trains on, as it is in the body of an operation."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from mrl.config.branch import Branch

LARGEST = 3.4e38
"""The largest allowed absolute value of a number, chosen so that the number fits into float32."""
TokenId = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Strict(), Field(ge=-LARGEST, le=LARGEST)]
PER_TOKEN = ("weights", "advantages", "logprobs", "ratio_mask")
"""The lists of a sequence with one number for each token that only losses read."""


class SequenceBody(Branch):
    """A sequence to train on. Index t of each list belongs to token t; the first token is never in
    the loss."""

    tokens: list[TokenId] = Field(min_length=2)
    targets: list[TokenId] | None = None
    """The tokens whose log-probs are in the loss and in the result, each given the tokens before its
    index. None takes `tokens`. The first one is not used."""
    weights: list[Number] | None = None
    """The weight of each token in `cross_entropy` and `linear`; None gives every token the weight 1."""
    advantages: list[Number] | None = None
    """The advantage of each token, for losses other than `cross_entropy`. Tokens with advantage 0
    are not in the loss."""
    logprobs: list[Number] | None = None
    """The log-prob with which each token was sampled, for losses other than `cross_entropy`."""
    ratio_mask: list[Annotated[float, Strict(), Field(ge=0, le=1)]] | None = None
    """In `gspo`, not 0 for the tokens over which the ratio of the sequence is taken. None takes the
    tokens whose advantage is not 0."""
    weight: Number = 1.0
    """Factor by which the loss of the sequence is multiplied."""
    sample: Annotated[str, Field(max_length=100)] | None = None
    """The id of the sample whose routes (the experts that the engine's router chose) are replayed.
    The sample must have the same tokens as this sequence. None: no routes are replayed."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        for name in ("targets", *PER_TOKEN):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.tokens):
                raise ValueError(
                    f"{name} has {len(given)} numbers for {len(self.tokens)} tokens; give one each"
                )
        return self


def factors_of(sequence: SequenceBody) -> list[float]:
    """Return the factor of each token in the loss: its weight, its advantage, or 1 if the sequence
    has neither list."""
    return sequence.weights or sequence.advantages or [1.0] * len(sequence.tokens)
