"""Adapt the coefficient of the KL penalty during a run, and compute KL penalties that are part of
the reward.

N packed tokens of a micro-batch, S samples of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.kl import adapted_coef, reward_penalties
from mrl.config import AlgorithmConfig
from mrl.types import MicroBatch
from parallel.mesh import Mesh
from parallel.packing import to_device
from parallel.reduce import sample_sums


@dataclass(frozen=True)
class Penalties:
    """The KL penalties that are subtracted from the rewards of a step."""

    tokens: list[Tensor]
    """f32[N] per micro-batch, on the last pipeline stage: the penalty of each token."""
    samples: Tensor
    """f64[S], the same on every rank: the sum of the penalties over the loss tokens of each sample."""
    has_tokens: Tensor
    """bool[S]: whether a sample has a loss token. A sample without one has 0 in `samples`."""
    mean: float
    """The mean of the KL estimator over the loss tokens of the step, without the coefficient."""


class KlControl:
    """The coefficient of a run's KL penalty, which may adapt from step to step."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self.coef = config.kl_coef

    @property
    def config(self) -> AlgorithmConfig:
        """The recipe's algorithm settings with the current coefficient."""
        return self._config.model_copy(update={"kl_coef": self.coef})

    @property
    def in_reward(self) -> bool:
        """Whether the KL is part of the reward."""
        return self._config.kl_coef > 0 and self._config.kl_in == "reward"

    def penalties(self, batches: Sequence[MicroBatch], num_samples: int, mesh: Mesh) -> Penalties:
        """Compute the penalties of a step from the old and the reference log-probs. A collective."""
        whole = self._config.model_copy(update={"kl_coef": 1.0})
        terms = [
            reward_penalties(batch.old_logprobs, to_device(batch, batch.old_logprobs.device), whole)
            for batch in batches
            if batch.old_logprobs is not None
        ]
        columns = [torch.stack([term, torch.ones_like(term)], dim=1) for term in terms]
        sums, counts = sample_sums(columns, batches, num_samples, mesh).unbind(1)
        mean = float(sums.sum() / counts.sum().clamp(min=1))
        return Penalties([self.coef * term for term in terms], self.coef * sums, counts > 0, mean)

    def end_step(self, measured: float, num_samples: int) -> dict[str, float]:
        """Adapt the coefficient for the next step; return this step's coefficient as `kl/coef`.

        measured: the mean KL per loss token of this step. If it is not finite, the coefficient does
        not change. num_samples: the number of trained samples of this step.
        """
        metrics = {"kl/coef": self.coef}
        if math.isfinite(measured):  # it is NaN if no token is in the loss
            self.coef = adapted_coef(self.coef, measured, num_samples, self._config)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the current coefficient, and the recipe's initial coefficient."""
        return {"kl_coef": self.coef, "start": self._config.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the coefficient in a `state_dict`.

        If the recipe's `kl_coef` has changed since, the recipe's value is used instead.
        """
        if state.get("start", self._config.kl_coef) == self._config.kl_coef:
            self.coef = state["kl_coef"]
