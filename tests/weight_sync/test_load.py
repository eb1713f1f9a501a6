"""A loader updates an endpoint, compares canaries, and adds up what that took."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mrl.config import ModelConfig, RolloutConfig
from mrl.engine_pool.metrics import EngineMetrics
from mrl.engines.base import SyncReport
from mrl.errors import RunFailed
from mrl.types import WeightBucket
from mrl.weight_sync.load import (
    QUANTIZATION_FACTOR,
    TOLERANCE_FLOAT32,
    Canaries,
    WeightLoader,
)

CANARIES = Canaries([torch.arange(3)], [torch.tensor([0.0, -1.0, -2.0])])


class Endpoint:
    weight_version = 4
    error = 0.0

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        assert version == self.weight_version
        return SyncReport(len(list(buckets)), 1.0, 0.25)

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return [logprobs + self.error for logprobs in CANARIES.logprobs]


@pytest.fixture
def loader() -> tuple[WeightLoader, EngineMetrics]:
    metrics = EngineMetrics()
    model = cast(ModelConfig, SimpleNamespace(dtype="float32"))
    config = cast(
        RolloutConfig,
        SimpleNamespace(canary_tolerance=None, engine_dtype=lambda model: model.dtype),
    )
    return WeightLoader(config, model, metrics), metrics


def test_updates_and_canaries_are_measured(loader: tuple[WeightLoader, EngineMetrics]) -> None:
    load, metrics = loader
    endpoint: Any = Endpoint()
    for num_buckets in (7, 5):
        load.update(endpoint, [WeightBucket([], 4)] * num_buckets, 4)
    assert metrics == EngineMetrics(verify_s=0.5, sync_bytes=5)
    for endpoint.error in (5e-4, 1e-4):
        load.check_canaries(endpoint, CANARIES)
    assert metrics.canary_abs_mean == pytest.approx(5e-4, rel=1e-2)
    assert metrics.verify_s > 0.5


def test_an_endpoint_with_another_model_is_refused(
    loader: tuple[WeightLoader, EngineMetrics],
) -> None:
    load, metrics = loader
    endpoint: Any = Endpoint()
    endpoint.error = 0.01
    with pytest.raises(RunFailed, match="version 4: engine and trainer disagree"):
        load.check_canaries(endpoint, CANARIES)
    for nothing in (None, Canaries([], [])):
        load.check_canaries(endpoint, nothing)
    assert metrics == EngineMetrics()


def test_quantised_weights_loosen_the_tolerance_by_what_they_change(
    loader: tuple[WeightLoader, EngineMetrics],
) -> None:
    load, metrics = loader
    endpoint: Any = Endpoint()
    quantised = dataclasses.replace(CANARIES, quantization_abs_mean=0.02)
    limit = TOLERANCE_FLOAT32 + QUANTIZATION_FACTOR * 0.02
    endpoint.error = 0.99 * limit
    load.check_canaries(endpoint, quantised)
    assert metrics.canary_abs_mean > 10 * TOLERANCE_FLOAT32
    endpoint.error = 1.01 * limit
    with pytest.raises(RunFailed, match="engine and trainer disagree"):
        load.check_canaries(endpoint, quantised)
