"""What a session is trained on, and what it samples. T tokens of a sequence, P prompt, C answer."""

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
    """A `Datum` is a sequence to train on. Index t of a field describes token t; the first token is in
    no loss."""

    tokens: Ids
    """i64[T], T at least 2."""
    weights: Numbers | None = None
    """f32[T]: what each token counts in `cross_entropy`; None counts each as 1."""
    advantages: Numbers | None = None
    """f32[T]: for the other losses. A token with advantage 0 is not in the loss."""
    logprobs: Numbers | None = None
    """f32[T]: for the other losses, what each token was sampled with."""
    weight: float = 1.0
    """What the whole sequence counts: losses are sums, so this carries the normaliser."""
    sample: str | None = None
    """The id of the sample whose routes the trainer replays; the tokens are its own."""

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the service's API."""
        lists = {"weights": self.weights, "advantages": self.advantages, "logprobs": self.logprobs}
        found: dict[str, Any] = {k: _floats(v) for k, v in lists.items() if v is not None}
        if self.sample is not None:
            found["sample"] = self.sample
        return {"tokens": ids(self.tokens), "weight": float(self.weight), **found}


@dataclass(frozen=True)
class Sample:
    """A `Sample` is one answer to a prompt."""

    id: str
    prompt: NDArray[np.int64]
    """i64[P]."""
    tokens: NDArray[np.int64]
    """i64[C]: the answer alone."""
    logprobs: NDArray[np.float32]
    """f32[C]: the engine's, at the sampling temperature."""
    version: int
    """That of the weights which sampled it."""
    stop_reason: str
    """`stop` or `length`."""

    def datum(self, advantage: float, weight: float = 1.0, *, replay: bool = True) -> Datum:
        """Return what trains each token of the answer with this advantage; `replay`: with the routes
        that the engine took, which a session with moe.routing_replay=off does not keep."""
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
    """Return token ids as JSON has them. Raises TypeError for numbers that are no integers."""
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(f"expected a list of token ids, got {found.dtype} of shape {found.shape}")
    return found.tolist()


def _floats(numbers: Numbers) -> list[float]:
    return np.asarray(numbers, dtype=np.float32).tolist()
