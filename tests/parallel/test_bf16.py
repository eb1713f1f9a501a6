"""bfloat16 weights with fp32 main parameters: the format of GPU runs, here on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import Sample
from parallel.checkpoint import Checkpoints
from parallel.hf_config import HfModel
from parallel.policy import Policy
from tests.parallel.test_layouts import (
    LAYOUTS,
    all_samples,
    exported,
    join_groups,
    loss,
    ready_batch,
)
from tests.ranks import run_ranks


def exercise(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], checkpoints: Path
) -> dict[str, Any]:
    groups = join_groups(model_path, sizes)

    def build() -> Policy:
        return Policy(
            HfModel.read(model_path),
            groups,
            ModelConfig(path=str(model_path), dtype="bfloat16"),
            OptimizerConfig(lr=1e-3),
            recompute=True,
            temperature=1.0,
        )

    policy = build()
    batch, _ = ready_batch(policy, groups, samples)
    norms = [policy.train_step(batch, loss, True).grad_norm for _ in range(2)]
    store = Checkpoints(checkpoints, groups, keep=1)
    store.save(2, policy, {})
    policy.host.offload_optimizer(policy.chunks, policy.optimizer)
    policy.host.offload_parameters(policy.chunks)
    policy.onload()
    resumed = build()
    store.load(2, resumed)
    for each in (policy, resumed):
        each.train_step(batch, loss, True)
    ours, theirs = exported(policy), exported(resumed)
    return {
        "norms": norms,
        "dtypes": {str(t.dtype) for t in ours.values()},
        "same": all(torch.equal(ours[name], t) for name, t in theirs.items()),
    }


@pytest.mark.parametrize("name", ["TP2xEP2", "PP2xEP2"])
def test_bf16_matches_one_process_and_keeps_its_main_parameters(
    name: str, model_path: Path, tmp_path: Path
) -> None:
    outs = []
    for world, sizes in ((1, {}), LAYOUTS[name]):
        folder = tmp_path / str(world)
        arguments = (model_path, sizes, all_samples(), folder / "ckpt")
        outs.append(run_ranks(world, exercise, *arguments, folder=folder / "out")[0])
    reference, ours = outs
    for out in outs:
        assert out["dtypes"] == {"torch.bfloat16"}
        assert out["same"]  # fp32 main parameters survive a checkpoint and the way to the host
    assert ours["norms"] == pytest.approx(reference["norms"], rel=1e-2)
