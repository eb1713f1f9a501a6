"""Megatron keeps Adam's state elsewhere under each option: steps are equal, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.routes import Replay
from mrl.types import Sample
from parallel.checkpoint.checkpoints import Checkpoints
from parallel.optimizer.setup import torch_adams, use_fused_kernels
from parallel.optimizer.state import optimizer_shards
from tests.parallel.few_samples import few_samples
from tests.parallel.layouts import build, exported, join_mesh, loss, ready_batch, saved_and_resumed
from tests.ranks import run_ranks
from tests.release import release

OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
Variant = tuple[str, bool, dict[str, Any]]
"""dtype, whether the optimizer is distributed, `megatron:`."""
VARIANTS: dict[str, Variant] = {
    "fp32": ("float32", False, OFFLOAD),
    "bf16": ("bfloat16", True, {**OFFLOAD, "optimizer_offload_fraction": 1.0}),
    "bf16, an Adam each": ("bfloat16", True, {**OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True}),
    "bf16 weights": ("bfloat16", True, {**OFFLOAD, "use_precision_aware_optimizer": True}),
    "bf16 gradients": ("bfloat16", True, {"grad_reduce_in_fp32": False}),
}
ROUNDED = ("bf16 gradients",)


IN_SHORT = ("bf16 weights",)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return few_samples()


def exercise(
    model_path: Path, samples: list[Sample], folder: Path, names: list[str]
) -> dict[str, Any]:
    """Two steps, a save, all memory to the host and back, a third step; and it again after a load."""
    mesh = join_mesh(model_path, {"expert": 2})

    def run(variant: Variant, checkpoints: Path | None = None) -> dict[str, Any]:
        dtype, distributed, options = variant

        def start() -> Any:
            return build(
                model_path,
                mesh,
                dtype=dtype,
                distributed_optimizer=distributed,
                megatron=options,
            )

        policy = start()
        batch, _ = ready_batch(policy, mesh, samples)
        norms = [policy.train_step(batch, loss, Replay.rollout).grad_norm for _ in range(2)]
        if checkpoints is None:
            policy.train_step(batch, loss, Replay.rollout)
            groups_of_adam = [g for a in torch_adams(policy.optimizer) for g in a.param_groups]
            assert groups_of_adam
            assert all(g["fused"] and not g["foreach"] for g in groups_of_adam)
            return {"weights": exported(policy), "norms": norms}
        checkpoints.parent.mkdir(parents=True, exist_ok=True)
        resumed = saved_and_resumed(policy, start, Checkpoints(checkpoints, mesh, keep=1))
        for each in (policy, resumed):
            each.train_step(batch, loss, Replay.rollout)
        ours, theirs = exported(policy), exported(resumed)
        states = optimizer_shards(policy.optimizer), optimizer_shards(resumed.optimizer)
        pairs = zip(*(s.values() for s in states), strict=True)
        same_state = all(
            torch.equal(tensor, b.tensors[name])
            for a, b in pairs
            for name, tensor in a.tensors.items()
        )
        return {
            "weights": ours,
            "norms": norms,
            "resumed": same_state and all(torch.equal(ours[k], t) for k, t in theirs.items()),
        }

    plain = {key: run((*key, {})) for key in {VARIANTS[name][:2] for name in names}}
    results = {}
    for name in names:
        variant = VARIANTS[name]
        reference, found = plain[variant[:2]], run(variant, folder / name)
        same = all(torch.equal(found["weights"][k], t) for k, t in reference["weights"].items())
        results[name] = {
            "same": same,
            "resumed": found["resumed"],
            "norms": [found["norms"], reference["norms"]],
        }
    return results


@pytest.mark.parametrize(
    "names", [list(IN_SHORT), release([n for n in VARIANTS if n not in IN_SHORT])], ids=", ".join
)
def test_offloaded_state_takes_the_same_steps_and_survives(
    names: list[str], model_path: Path, samples: list[Sample], tmp_path: Path
) -> None:
    args = (model_path, samples, tmp_path / "c", names)
    for rank in run_ranks(2, exercise, *args, folder=tmp_path / "o"):
        assert list(rank) == names
        for name, result in rank.items():
            assert result["resumed"], name
            assert result["same"] == (name not in ROUNDED), name
            assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-2), name


def test_the_fused_step_is_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    results = []
    for fused in (False, True):
        weight = torch.nn.Parameter(start.clone())
        adam = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01)
        if fused:
            use_fused_kernels(SimpleNamespace(optimizer=adam))
        for step in range(5):
            weight.grad = start.roll(step) * 1e-3
            adam.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    assert not torch.equal(results[0], start)
