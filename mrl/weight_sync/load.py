"""Loads weights into the endpoint of an engine, and proves that the engine runs the trainer's model.

Digests prove that the engine holds the numbers that were sent (`PolicyEndpoint.update_weights`).
Canaries prove that the engine computes the same model from these numbers. They are prompts for which
trainer and engine must compute the same log-probs after each weight sync, so they cover names, layouts,
the KV cache and the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import PolicyEndpoint
from mrl.errors import NotFinite, RunFailed
from mrl.quantization import SCHEMES, with_rounding_noise
from mrl.types import Prompt, WeightBucket
from parallel.implementation import choose_dtype
from parallel.policy import Policy

MAX_TOKENS = 64
TOLERANCE_FLOAT32 = 1e-3
TOLERANCE_HALF = 0.1
"""The default of `rollout.canary_tolerance` unless trainer and engine both run in fp32. It is
higher than TOLERANCE_FLOAT32, because in half precision a few tokens are routed to other experts. A
wrong model differs by more than 1."""


QUANTIZATION_FACTOR = 4.0
"""With quantised weights, the tolerance is raised by this factor times
`Canaries.quantization_abs_mean`. The engine quantises the weights, and also the inputs of the layers.
Each of these two steps changes log-probs by about `quantization_abs_mean`, and the rest of the factor
is margin."""


@dataclass(frozen=True)
class Canaries:
    """Prompts that test whether an engine computes the trainer's model: token sequences i64[T], and
    the log-probs f32[T] that the trainer computes for them."""

    sequences: list[Tensor]
    logprobs: list[Tensor]
    quantization_abs_mean: float = 0.0
    """Mean absolute change in the trainer's log-probs of the sequences when noise as large as the
    weights' rounding errors is added to the weights; 0 for engines without quantised weights."""


def default_tolerance(*dtypes: torch.dtype) -> float:
    """Return the default limit for the mean absolute difference between the engine's and the
    trainer's log-probs of the canaries. `dtypes` are those of trainer and engine."""
    exact = all(dtype == torch.float32 for dtype in dtypes)
    return TOLERANCE_FLOAT32 if exact else TOLERANCE_HALF


def canary_sequences(prompts: Sequence[Prompt], num: int) -> list[Tensor]:
    """Return the first `num` prompts of at least two tokens as i64[T], each cut to MAX_TOKENS
    tokens."""
    long_enough = [p.token_ids[:MAX_TOKENS] for p in prompts if p.token_ids.numel() > 1]
    return long_enough[:num]


class CanaryMaker:
    """Computes the trainer's log-probs of the canaries for each weight sync."""

    def __init__(
        self, config: RolloutConfig, model: ModelConfig, prompts: Sequence[Prompt]
    ) -> None:
        self._sequences = canary_sequences(prompts, config.canary_prompts)
        self._scheme = SCHEMES.get(config.quantization)
        self._dtype = choose_dtype(config.engine_dtype(model))
        self._effect: float | None = None
        """The value of `Canaries.quantization_abs_mean`, measured at the first sync of quantised
        weights; None before it is measured."""

    def make(self, policy: Policy) -> Canaries:
        """Return the canaries with the log-probs of `policy`, which must be on the device. A
        collective."""
        if not self._sequences:
            return Canaries([], [])
        logprobs = policy.sequence_logprobs(self._sequences)
        is_finite = all(bool(own[1:].isfinite().all()) for own in logprobs)  # else the sync raises
        if self._scheme is not None and self._effect is None and is_finite:
            with policy.fake_quantized(partial(with_rounding_noise, self._scheme), self._dtype):
                noisy = policy.sequence_logprobs(self._sequences)
            self._effect = _mean_difference(noisy, logprobs)
        return Canaries(self._sequences, logprobs, self._effect or 0.0)


def _mean_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the mean |a - b| over all tokens but the first of each sequence."""
    return float(torch.cat([(x - y)[1:].abs() for x, y in zip(a, b, strict=True)]).mean())


def check_canaries(
    endpoint: PolicyEndpoint,
    sequences: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: float,
) -> float:
    """Return the mean absolute difference between the engine's and the trainer's log-probs. The mean
    is over all tokens of the canary `sequences` except each sequence's first token.

    Raises RunFailed if the mean is above `tolerance` or not a number. Raises NotFinite if the
    trainer's log-probs `expected` are not finite, because then the weights are at fault and not the
    engine.
    """
    bad = [i for i, own in enumerate(expected) if not bool(own[1:].isfinite().all())]
    if bad:
        raise NotFinite(
            f"weight sync to version {endpoint.weight_version}: the trainer's own log-probs of canary "
            f"prompt {bad[0]} are not finite: its weights hold NaN or infinity, or overflow; look at "
            "the model with mrl check --deep, or continue from an earlier checkpoint"
        )
    got = endpoint.sequence_logprobs(sequences)
    differences = [(a - b)[1:].abs() for a, b in zip(got, expected, strict=True)]
    mean = float(torch.cat(differences).mean())
    if not mean <= tolerance:
        worst = max(
            range(len(differences)), key=lambda i: float(differences[i].nan_to_num(1e9).mean())
        )
        raise RunFailed(
            f"weight sync to version {endpoint.weight_version}: engine and trainer disagree on the "
            f"canary prompts: mean |difference| of log-probs {mean:.3g}, expected at most "
            f"{tolerance:g} "
            f"(rollout.canary_tolerance); worst is canary {worst} with "
            f"{float(differences[worst].mean()):.3g}. The engine does not run the trainer's model: "
            "check model.path, dtype and the versions; debug.rollout_only=true is a short way to try"
        )
    return mean


class LoadMetrics(Protocol):
    """The part of `mrl.engine_pool.metrics.EngineMetrics` that a `WeightLoader` sets."""

    verify_s: float
    canary_abs_mean: float
    sync_bytes: float

    def verifying(self) -> AbstractContextManager[None]: ...


class WeightLoader:
    """Loads versions of the weights into engines, through their endpoints. It is used on trainer
    ranks and in the workers of rollout ranks."""

    def __init__(self, config: RolloutConfig, model: ModelConfig, metrics: LoadMetrics) -> None:
        dtypes = choose_dtype(model.dtype), choose_dtype(config.engine_dtype(model))
        self._tolerance = config.canary_tolerance or default_tolerance(*dtypes)
        self._metrics = metrics

    def update(
        self, endpoint: PolicyEndpoint, buckets: Iterable[WeightBucket], version: int
    ) -> None:
        """Load the buckets of a version of the weights, and verify their digests. Raises ValueError
        or RuntimeError as `PolicyEndpoint.update_weights` does."""
        report = endpoint.update_weights(buckets, version)
        self._metrics.verify_s += report.digest_s
        self._metrics.sync_bytes = report.num_bytes

    def check_canaries(self, endpoint: PolicyEndpoint, canaries: Canaries | None) -> None:
        """Compare the engine's log-probs of the canaries with the trainer's, if there are canaries.

        All memory of the engine must be awake, and no call of generate() may be open. Raises
        RunFailed if the log-probs disagree, and NotFinite if those of the trainer are not finite.
        """
        if canaries is None or not canaries.sequences:
            return
        with self._metrics.verifying():
            tolerance = self._tolerance + QUANTIZATION_FACTOR * canaries.quantization_abs_mean
            found = check_canaries(endpoint, canaries.sequences, canaries.logprobs, tolerance)
        self._metrics.canary_abs_mean = max(self._metrics.canary_abs_mean, found)
