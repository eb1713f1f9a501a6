"""What a client trains on and samples from, in the SDK's terms: a sequence of tokens and the numbers
of its targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {"float32": np.float32, "int64": np.int64}
MAX_INPUTS = 16
"""Maximum number of named inputs of a datum."""


class BadDatum(ValueError):
    """A datum or a prompt cannot be trained on or sampled from, for the reason in the message."""


@dataclass(frozen=True)
class Span:
    """Where a run of tokens comes from (the SDK's ProvenanceSpan)."""

    is_sampled: bool
    """Whether the tokens were sampled; otherwise they were in the prompt."""
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True)
class Datum:
    """A sequence to train on. Every input is an array of N numbers; number i belongs to the target
    that follows token i."""

    tokens: list[int]
    """The N tokens of `model_input`."""
    inputs: Mapping[str, NDArray[Any]]
    spans: tuple[Span, ...] = ()
    """Where the targets come from; empty if the client does not say."""


@dataclass(frozen=True)
class Pass:
    """A request for a forward pass, or for a forward and a backward pass."""

    model_id: str
    seq_id: int
    loss: str
    data: list[Datum]
    options: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def make_datum(
    number: int, tokens: list[int], inputs: Mapping[str, NDArray[Any]], spans: tuple[Span, ...] = ()
) -> Datum:
    """Return a datum. Raises BadDatum if its inputs do not have one number for each token."""
    for name, values in inputs.items():
        if values.ndim != 1:
            raise BadDatum(
                f"datum {number}: {name} has the shape {list(values.shape)}; this server trains on one "
                f"target for each position, expected [{len(tokens)}]"
            )
        if len(values) != len(tokens):
            raise BadDatum(
                f"datum {number}: {name} has {len(values)} numbers for {len(tokens)} tokens of "
                "model_input; give one each"
            )
        if not np.isfinite(values).all():
            raise BadDatum(f"datum {number}: {name} has a number that is not finite")
    if not tokens:
        raise BadDatum(f"datum {number}: model_input has no token")
    if "target_tokens" not in inputs:
        raise BadDatum(f"datum {number}: target_tokens is missing; every loss needs it")
    if inputs["target_tokens"].dtype.kind != "i":
        raise BadDatum(f"datum {number}: target_tokens holds {inputs['target_tokens'].dtype}s")
    return Datum(tokens, inputs, spans)
