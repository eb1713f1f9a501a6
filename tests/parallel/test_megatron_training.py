"""Options under `megatron:` that move work or memory about, and the run without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from moe.routes import Replay
from mrl.types import Sample
from parallel.policy import Policy
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import build, distance, exported, join_mesh, loss, ready_batch
from tests.parallel.models import tiny_samples, write_tiny
from tests.ranks import run_ranks
from tests.release import release

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 500}
SAME_BITS: dict[str, dict[str, Any]] = {
    "gradients while the backward pass runs": OVERLAP,
    "parameters while the forward pass runs": {**OVERLAP, "overlap_param_gather": True},
    "attention again": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "norms and dense layers again": {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "mlp"],
    },
    "experts and their router again": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
    "messages freed": {"deallocate_pipeline_outputs": True},
}
"""Options for two steps of the distributed optimizer on a model of dense and MoE layers."""
IN_SHORT = (
    "parameters while the forward pass runs",
    "norms and dense layers again",
    "experts and their router again",
)
"""What `make test` takes of them: the first has the overlap of the gradients too."""
OTHER_SUMS = {
    "gradients while the backward pass runs": 1e-6,
    "parameters while the forward pass runs": 1e-6,
    "norms and dense layers again": 1e-6,
}
"""Relative: other buckets give a rank other parts of the parameters, over which it takes the gradient
norm; and the gradients of a norm's two readers are added up before they reach its input."""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def steps(policy: Policy, mesh: Any, samples: list[Sample]) -> list[dict[str, Tensor]]:
    """The weights after each of two updates, with a pass without gradients before and in between.

    The second has more micro-batches: Megatron counts in the first one how often a gradient is ready
    before it is reduced, which only holds where just the last micro-batch counts (`no_sync`).
    """
    weights = []
    for part in (samples[:3], samples):
        batch, _ = ready_batch(policy, mesh, part)
        policy.train_step(batch, loss, Replay.rollout)
        weights.append(exported(policy))
    return weights


def compare_all(
    model_path: Path,
    sizes: dict[str, int],
    samples: list[Sample],
    dtype: str,
    names: tuple[str, ...],
) -> dict[str, float]:
    """Relative distance from the plain run, by option set, one after the other in one process."""
    mesh = join_mesh(model_path, sizes)

    def run(options: dict[str, Any]) -> list[dict[str, Tensor]]:
        policy = build(model_path, mesh, dtype=dtype, distributed_optimizer=True, megatron=options)
        return steps(policy, mesh, samples)

    plain = run({})
    return {name: max(map(distance, run(SAME_BITS[name]), plain)) for name in names}


@pytest.mark.parametrize(
    ("world", "sizes", "dtype", "names"),
    [
        (2, {}, "bfloat16", IN_SHORT),
        release(2, {}, "bfloat16", tuple(SAME_BITS)),
        release(
            4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, "float32", tuple(SAME_BITS)
        ),
    ],
    ids=["DP2 bf16", "DP2 bf16, all", "PP2xVPP2xEP2, all"],
)
def test_the_same_bits(
    world: int,
    sizes: dict[str, int],
    dtype: str,
    names: tuple[str, ...],
    model_path: Path,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    arguments = (model_path, sizes, samples, dtype, names)
    for out in run_ranks(world, compare_all, *arguments, folder=tmp_path):
        assert out.keys() == set(names)
        assert all(found <= OTHER_SUMS.get(name, 0.0) for name, found in out.items()), out


def compare_overlap(folder: Path, sizes: dict[str, int]) -> float:
    """Relative distance of the weights with shared experts beside the messages from those without."""
    samples = tiny_samples(folder, lengths=(7, 31, 12, 40, 14, 9, 22, 17))
    mesh = join_mesh(folder, sizes)
    plain, beside = (
        steps(build(folder, mesh, distributed_optimizer=True, megatron=options), mesh, samples)
        for options in ({}, {"moe_shared_expert_overlap": True})
    )
    return max(map(distance, beside, plain))


@pytest.mark.parametrize("world", [release(1), 2])
def test_shared_experts_beside_the_messages_of_the_others(world: int, tmp_path: Path) -> None:
    """Which of their steps run where has moved between megatron-core 0.16 and 0.19."""
    folder = write_tiny("qwen2_moe", tmp_path / "model")
    for found in run_ranks(world, compare_overlap, folder, {"expert": world}, folder=tmp_path):
        assert found < 1e-6
