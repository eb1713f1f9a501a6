"""The sequences that a session trains on and the samples that the session returns.

Dimensions: T tokens of a sequence, P tokens of a prompt, C tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[Any]
Numbers = Sequence[float] | NDArray[Any]


@dataclass(frozen=True)
class Datum:
    """A sequence to train on. Index t of each list belongs to token t; the first token is never in
    the loss."""

    tokens: Ids
    """The token ids i64[T] of the sequence, with T at least 2."""
    weights: Numbers | None = None
    """f32[T]: the weight of each token in `cross_entropy` and `linear`; None gives every token the
    weight 1."""
    advantages: Numbers | None = None
    """f32[T]: the advantage of each token, for losses other than `cross_entropy`. Tokens with
    advantage 0 are not in the loss."""
    logprobs: Numbers | None = None
    """f32[T]: the log-prob with which each token was sampled, for losses other than `cross_entropy`."""
    weight: float = 1.0
    """Factor by which the loss of the sequence is multiplied. The loss is a sum over tokens, so
    normalisers such as 1 / num_tokens belong here."""
    targets: Ids | None = None
    """i64[T]: the tokens whose log-probs are in the loss, each given the tokens before its index; the
    first is not used. None takes `tokens`."""
    ratio_mask: Numbers | None = None
    """f32[T]: not 0 for the tokens over which `gspo` takes the ratio of the sequence. None takes the
    tokens with an advantage."""
    sample: str | None = None
    """The id of the `Sample` whose routes (the experts that the engine's router chose) the trainer
    replays. The sample must have the same tokens as this datum. None: no routes are replayed."""

    def body(self) -> dict[str, Any]:
        """Return the sequence as a JSON object of the service's API."""
        names = ("weights", "advantages", "logprobs", "ratio_mask")
        lists = {name: getattr(self, name) for name in names}
        found: dict[str, Any] = {k: _floats(v) for k, v in lists.items() if v is not None}
        if self.targets is not None:
            found["targets"] = ids(self.targets)
        if self.sample is not None:
            found["sample"] = self.sample
        return {"tokens": ids(self.tokens), "weight": float(self.weight), **found}


@dataclass(frozen=True)
class Sample:
    """One answer that the engine sampled for a prompt."""

    id: str
    prompt: NDArray[np.int64]
    """i64[P]: the token ids of the prompt."""
    tokens: NDArray[np.int64]
    """i64[C]: the token ids of the answer, without the prompt."""
    logprobs: NDArray[np.float32]
    """f32[C]: the engine's log-probs of `tokens`, at the sampling temperature."""
    version: int
    """The version of the weights that sampled the answer."""
    stop_reason: str
    """Why the answer ended: `stop` (at an end-of-sequence token or a stop string or token) or
    `length` (at the maximum number of tokens)."""

    def datum(self, advantage: float, weight: float = 1.0, *, replay: bool = True) -> Datum:
        """Return a `Datum` of prompt and answer, in which every token of the answer has this
        advantage and no token of the prompt is in the loss.

        `replay`: whether the trainer replays the engine's routes (see `Datum.sample`). Set it to
        False in a session with moe.routing_replay=off, because such a session does not keep the
        routes.
        """
        before = len(self.prompt)
        advantages = np.zeros(before + len(self.tokens), np.float32)
        advantages[before:] = advantage
        logprobs = np.zeros_like(advantages)
        logprobs[before:] = self.logprobs
        return Datum(
            tokens=np.concatenate([self.prompt, self.tokens]),
            advantages=advantages,
            logprobs=logprobs,
            weight=weight,
            sample=self.id if replay else None,
        )


def ids(tokens: Ids) -> list[int]:
    """Return token ids as a list for JSON. Raises TypeError if `tokens` is not a flat sequence of
    integers."""
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(f"expected a list of token ids, got {found.dtype} of shape {found.shape}")
    return found.tolist()


def _floats(numbers: Numbers) -> list[float]:
    return np.asarray(numbers, dtype=np.float32).tolist()
