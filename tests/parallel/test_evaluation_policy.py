"""A policy without optimizer holds its weights alone, and has the outputs of the one that trained."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import Sample, TrainBatch
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.hf_config import HfModel
from parallel.mesh import Mesh
from parallel.policy import Policy
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import exported, join_mesh, loss, ready_batch
from tests.ranks import run_ranks
from tests.release import release

STEP = 1


def build(model_path: Path, mesh: Mesh, dtype: Any, optimizer: OptimizerConfig | None) -> Policy:
    config = ModelConfig(path=str(model_path), dtype=dtype)
    model = HfModel.read(model_path)
    return Policy(model, mesh, config, optimizer, recompute=False, temperature=1.0)


def live_bytes() -> int:
    """All tensors that Python knows of, each storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def train_then_evaluate(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], dtype: str, root: Path
) -> dict[str, Any]:
    mesh = join_mesh(model_path, sizes)
    trained = build(model_path, mesh, dtype, OptimizerConfig(lr=1e-2))
    batch, _ = ready_batch(trained, mesh, samples)
    trained.train_step(batch, loss, Replay.rollout)
    Checkpoints(root, mesh, keep=1).save(STEP, trained, {})

    before = live_bytes()
    policy = build(model_path, mesh, dtype, None)
    added = live_bytes() - before
    from_folder = exported(policy)
    Checkpoints(root, mesh, keep=1).load(STEP, policy)
    theirs, ours = exported(trained), exported(policy)
    sequences = [sample.token_ids for sample in samples]
    wanted, found = (p.sequence_logprobs(sequences) for p in (trained, policy))
    with pytest.raises(RuntimeError, match="made without an optimizer: it cannot be trained"):
        policy.train_step(TrainBatch([], 1, 1), loss, Replay.off)
    policy.offload_optimizer()
    policy.onload()
    return {
        "kinds": sorted(policy.ledger.where()),
        "weights": policy.ledger.where()["parameters"].device,
        "added": added,
        "moved": any(not torch.equal(ours[name], from_folder[name]) for name in ours),
        "same": all(torch.equal(ours[name], theirs[name]) for name in theirs),
        "logprobs": all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)),
    }


@pytest.mark.parametrize(
    ("world", "sizes", "dtype"),
    [
        release(1, {}, "float32"),
        (2, {"pipeline": 2, "virtual_pipeline": 2}, "bfloat16"),
        release(1, {}, "bfloat16"),
        release(4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, "float32"),
        release(4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, "bfloat16"),
    ],
    ids=str,
)
def test_weights_are_all_that_it_holds(
    world: int, sizes: dict[str, int], dtype: str, model_path: Path, tmp_path: Path
) -> None:
    outs = run_ranks(
        world, train_then_evaluate, model_path, sizes, few_samples(), dtype, tmp_path / "saved",
        folder=tmp_path / "out",
    )  # fmt: skip
    for out in outs:
        assert out["kinds"] == ["parameters"]
        # Beside the weights: rotary frequencies and the like.
        assert out["weights"] <= out["added"] < 1.05 * out["weights"]
        assert out["moved"]
        assert out["same"]
        assert out["logprobs"]
