"""A pipeline stage without a matrix of the adapter: it has dense layers, and experts are adapted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.config.adapter import Adapter
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.lora.weights import LoraSetup
from parallel.policy import Policy
from tests.parallel.layouts import (
    TOLERANCE,
    build,
    distance,
    exported,
    join_mesh,
    loss,
    ready_batch,
    replay_of,
    saved_and_resumed,
    train,
)
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks

ADAPTER = Adapter(4, 8.0, (), "per_expert", ("gate_proj", "up_proj", "down_proj"))


def train_and_resume(
    model_path: Path, sizes: dict[str, int], samples: list[Sample], distributed: bool, store: Path
) -> dict[str, Any]:
    """Two steps, a save and a load by another policy, and two steps more."""
    mesh = join_mesh(model_path, sizes)

    def make() -> Policy:
        setup = LoraSetup(ADAPTER, "gaussian")
        return build(model_path, mesh, True, lora=setup, distributed_optimizer=distributed)

    policy = make()
    steps = train(policy, mesh, samples, 1)
    batch, _ = ready_batch(policy, mesh, samples)
    assert policy.train_step(batch, loss, replay_of(samples)).lr == 1e-3
    resumed = saved_and_resumed(policy, make, Checkpoints(store, mesh, keep=1))
    steps += train(resumed, mesh, samples, 2)
    pairs = [(step["loss/policy"], step["grad_norm"]) for step in steps]
    return {"steps": pairs, "adapter": exported(resumed)}


@pytest.mark.release
@pytest.mark.parametrize("distributed", [False, True])
def test_a_stage_that_has_nothing_to_train_takes_part(distributed: bool, tmp_path: Path) -> None:
    model = write_tiny("qwen3_moe", tmp_path / "model", mlp_only_layers=[0, 1])
    samples = tiny_samples(model)

    def run(world: int, sizes: dict[str, int]) -> dict[str, Any]:
        out = tmp_path / str(world)
        arguments = model, sizes, samples, distributed, out / "c"
        return run_ranks(world, train_and_resume, *arguments, folder=out)[0]

    one, two = run(1, {}), run(2, {"pipeline": 2})
    for ours, theirs in zip(two["steps"], one["steps"], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert distance(two["adapter"], one["adapter"]) < TOLERANCE
