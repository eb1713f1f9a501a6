"""bfloat16 weights with fp32 main parameters: the format of GPU runs, here on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.hf_config import HfModel
from parallel.policy import Policy
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import (
    exported,
    join_mesh,
    loss,
    ready_batch,
    saved_and_resumed,
)
from tests.ranks import run_ranks
from tests.release import release


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def exercise(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], checkpoints: Path
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)

    def build() -> Policy:
        return Policy(
            HfModel.read(model_path),
            mesh,
            ModelConfig(path=str(model_path), dtype="bfloat16"),
            OptimizerConfig(lr=1e-3),
            recompute=True,
            temperature=1.0,
        )

    policy = build()
    batch, _ = ready_batch(policy, mesh, samples)
    norms = [policy.train_step(batch, loss, Replay.rollout).grad_norm for _ in range(2)]
    resumed = saved_and_resumed(policy, build, Checkpoints(checkpoints, mesh, keep=1))
    for each in (policy, resumed):
        each.train_step(batch, loss, Replay.rollout)
    ours, theirs = exported(policy), exported(resumed)
    return {
        "norms": norms,
        "dtypes": {str(t.dtype) for t in ours.values()},
        "same": all(torch.equal(ours[name], t) for name, t in theirs.items()),
    }


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, {"tensor": 2, "expert": 2}), release(4, {"pipeline": 2, "expert": 2})],
)
def test_bf16_matches_one_process_and_keeps_its_main_parameters(
    world: int,
    sizes: dict[str, int],
    model_path: Path,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    outs = []
    for ranks, layout in ((1, {}), (world, sizes)):
        folder = tmp_path / str(ranks)
        arguments = (model_path, layout, samples, folder / "ckpt")
        outs.append(run_ranks(ranks, exercise, *arguments, folder=folder / "out")[0])
    reference, ours = outs
    for out in outs:
        assert out["dtypes"] == {"torch.bfloat16"}
        assert out["same"]  # fp32 main parameters survive a checkpoint and the way to the host
    assert ours["norms"] == pytest.approx(reference["norms"], rel=1e-2)
