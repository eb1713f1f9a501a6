"""This module keeps the KL's adaptive coefficient over a run, and computes the KL in the reward.

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
from parallel.sample_sums import sample_sums


@dataclass(frozen=True)
class Penalties:
    """What the KL subtracts from the rewards of a step."""

    tokens: list[Tensor]
    """f32[N] a micro-batch, on the last pipeline stage."""
    samples: Tensor
    """f64[S]: their sums, on every rank."""
    has_tokens: Tensor
    """bool[S]: samples with a loss token; the others have nothing to sum."""
    mean: float
    """The estimator itself, a token, over the step."""


class KlControl:
    """This holds the coefficient of a run's KL penalty."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self.coef = config.kl_coef

    @property
    def config(self) -> AlgorithmConfig:
        """The recipe's branch with the coefficient of the present step."""
        return self._config.model_copy(update={"kl_coef": self.coef})

    @property
    def in_reward(self) -> bool:
        return self._config.kl_coef > 0 and self._config.kl_in == "reward"

    def penalties(self, batches: Sequence[MicroBatch], num_samples: int, mesh: Mesh) -> Penalties:
        """Compute the penalties of the policy before the update, from old and reference log-probs.

        A collective.
        """
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
        """Return this step's coefficient as a metric, and adapt it to the KL `measured` a token."""
        metrics = {"kl/coef": self.coef}
        if math.isfinite(measured):  # it is NaN where no token is in the loss
            self.coef = adapted_coef(self.coef, measured, num_samples, self._config)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.coef, "start": self._config.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the coefficient of `state_dict`, unless the recipe gives another one since."""
        if state.get("start", self._config.kl_coef) == self._config.kl_coef:
            self.coef = state["kl_coef"]
