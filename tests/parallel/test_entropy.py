"""The entropy bonus under parallelism: the same update as one process that holds all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moe.routes import Replay
from mrl.algorithms import gspo
from mrl.algorithms.entropy import with_entropy_bonus
from mrl.config import AlgorithmConfig
from mrl.types import LossOutput, MicroBatch, Sample
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import (
    CHUNK,
    TOLERANCE,
    build,
    distance,
    exported,
    join_mesh,
    ready_batch,
)
from tests.ranks import run_ranks
from tests.release import release

COEF = 0.5


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def updated(
    model_path: Path, sizes: dict[str, Any], samples: list[Sample], chunk: int, coef: float
) -> dict[str, Tensor]:
    """The weights after one update by the entropy alone, or with a `coef` of 0 by the policy loss."""
    mesh = join_mesh(model_path, sizes)
    policy = build(model_path, mesh, logprob_chunk_tokens=chunk)
    config = AlgorithmConfig(clip_low=0.9, clip_high=10.0, entropy_coef=coef)

    def loss(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
        found = gspo.loss(logprobs, batch, config)
        if coef:
            found = LossOutput(0 * found.loss_sum, found.stats)
        return with_entropy_bonus(found, batch, gspo, config)

    batch, _ = ready_batch(policy, mesh, samples)
    policy.train_step(batch, loss, Replay.rollout)
    return exported(policy)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"tensor": 2}),
        release(2, {"context": 2}),
        release(2, {"pipeline": 2}),
        release(4, {"tensor": 2, "context": 2}),
    ],
    ids=str,
)
def test_the_same_update(
    world: int, sizes: dict[str, int], model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    (one,) = run_ranks(1, updated, model_path, {}, samples, 0, COEF, folder=tmp_path / "one")
    (other,) = run_ranks(1, updated, model_path, {}, samples, 0, 0.0, folder=tmp_path / "other")
    assert distance(one, other) > 100 * TOLERANCE
    for ours in run_ranks(
        world, updated, model_path, sizes, samples, CHUNK, COEF, folder=tmp_path / "ours"
    ):
        assert distance(ours, one) < TOLERANCE
