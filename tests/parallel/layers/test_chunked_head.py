"""The chunked head beside the whole one: the same log-probs and gradients in every layout."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from mrl.types import Sample
from parallel.hf_config import HfModel
from parallel.layers.output_layer import DeferredOutputLayer, MainGradient
from parallel.model import unwrap
from parallel.policy import Policy
from tests.parallel.layouts import join_mesh, loss, ready_batch
from tests.ranks import run_ranks
from tests.release import release

CHUNK = 9
"""Rows of a chunk: micro-batches have some 64 tokens, and it divides no count of loss tokens."""


@dataclass(frozen=True)
class Variant:
    """A layout with what else the head must get right in it."""

    sizes: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    dtype: Any = "float32"
    true_on_policy: bool = False
    distributed_optimizer: bool = False
    megatron: dict[str, Any] = field(default_factory=dict)


OVERLAP = {"overlap_grad_reduce": True}
VARIANTS = {
    1: [Variant(), Variant(tied=True), Variant(true_on_policy=True), Variant(dtype="bfloat16")],
    2: [
        Variant({"tensor": 2}),
        Variant({"tensor": 2}, tied=True, distributed_optimizer=True),
        Variant({"tensor": 2}, dtype="bfloat16"),
        Variant({"pipeline": 2}),
        Variant({"pipeline": 2}, tied=True),
        Variant({"pipeline": 2, "virtual_pipeline": 2}),
        Variant({"context": 2}),
        Variant({"expert": 2}, distributed_optimizer=True),
        Variant(distributed_optimizer=True, megatron=OVERLAP),
        Variant({"tensor": 2}, tied=True, dtype="bfloat16", megatron=OVERLAP),
    ],
    4: [
        Variant({"tensor": 2, "context": 2}),
        Variant({"tensor": 2, "pipeline": 2, "expert": 2}, tied=True),
        Variant({"tensor": 2, "expert_tensor": 2, "expert": 2}, dtype="bfloat16"),
    ],
}


def one_pass(path: Path, mesh: Any, variant: Variant, chunk: int, samples: list[Sample]) -> dict:
    """Log-probs, entropies and gradients of a step by a head of so many tokens a chunk."""
    policy = Policy(
        HfModel.read(path),
        mesh,
        ModelConfig(path=str(path), dtype=variant.dtype),
        OptimizerConfig(use_distributed_optimizer=variant.distributed_optimizer),
        recompute=False,
        temperature=0.8,
        true_on_policy=variant.true_on_policy,
        logprob_chunk_tokens=chunk,
        megatron=variant.megatron,
    )
    last = unwrap(policy.chunks[-1])
    if last.post_process:
        assert isinstance(last.output_layer, DeferredOutputLayer) == bool(chunk)
    batch, _ = ready_batch(policy, mesh, samples)
    before = policy.forward_only(batch.micro_batches, Replay.rollout)
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        for number, part in enumerate(policy.chunks):
            for name, parameter in unwrap(part).named_parameters():
                gradients[f"{number} {name}"] = getattr(parameter, "main_grad").clone()  # noqa: B009

    output = policy.train_step(batch, loss, Replay.rollout, keep).output
    for a, b in zip(before.logprobs, output.logprobs, strict=True):
        assert torch.equal(a, b)  # the ratio before the first update is 1
    return {
        "logprobs": torch.cat([torch.zeros(0), *before.logprobs]),
        "entropies": torch.cat([torch.zeros(0), *before.entropies]),
        "gradients": gradients,
    }


IN_RELEASE = {
    1: (1, 3),
    2: (1, 2, 3, 5, 6, 7, 8),
    4: (0, 1, 2),
}
"""Numbers of the variants that `make test` leaves out: of each kind of layout one stays."""


def variants(world: int, released: bool) -> list[Variant]:
    cases = enumerate(VARIANTS[world])
    return [variant for n, variant in cases if (n in IN_RELEASE[world]) == released]


def compare(
    paths: dict[bool, Path], cases: list[Variant], samples: list[Sample]
) -> list[dict[str, float]]:
    """Return the largest differences between the two heads on this rank, for each variant."""
    found = []
    for variant in cases:
        mesh = join_mesh(paths[variant.tied], variant.sizes)
        chunked, whole = (
            one_pass(paths[variant.tied], mesh, variant, chunk, samples) for chunk in (CHUNK, 0)
        )
        difference = {
            key: float((chunked[key] - whole[key]).abs().max()) if len(whole[key]) else 0.0
            for key in ("logprobs", "entropies")
        }
        assert chunked["gradients"].keys() == whole["gradients"].keys()
        difference["gradients"] = max(
            float((chunked["gradients"][name] - wanted).norm() / wanted.norm().clamp(min=1e-9))
            for name, wanted in whole["gradients"].items()
        )
        difference["size"] = float(whole["logprobs"].abs().sum())
        found.append(difference)
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(
    ("world", "released"),
    [release(1, False), (2, False), release(1, True), release(2, True), release(4, True)],
)
def test_values_and_gradients_are_those_of_the_whole_head(
    world: int,
    released: bool,
    model_path: Path,
    tied_model_path: Path,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    paths = {False: model_path, True: tied_model_path}
    cases = variants(world, released)
    ranks = run_ranks(world, compare, paths, cases, samples, folder=tmp_path)
    for variant, *found in zip(cases, *ranks, strict=True):
        half = variant.dtype == "bfloat16"
        assert max(rank["size"] for rank in found) > 0
        for rank in found:
            # The logits of a row may differ in a last bit of their dtype: 2^-8 of bf16.
            for key in ("logprobs", "entropies"):
                limit = 0.0 if variant.true_on_policy else 3e-2 if half else 1e-6
                assert rank[key] <= limit, (variant, key)
            # In bf16 the whole head rounds the weight's gradient once more than the chunked one.
            assert rank["gradients"] <= (1e-2 if half else 1e-6), variant


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_gradient_goes_to_the_buffer_by_megatrons_protocol(
    overlaps: bool, tied: bool
) -> None:
    """The hook of Megatron's DDP adds `.grad` unless it was told not to, and under
    `overlap_grad_reduce` it refuses a weight without one."""
    weight: Any = torch.nn.Parameter(torch.randn(5, 3).bfloat16())
    weight.main_grad = torch.ones(5, 3)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = tied
    gradient = MainGradient(weight, fused=False, overlaps=overlaps)
    parts = [(torch.randn(n, 5).bfloat16(), torch.randn(n, 3).bfloat16()) for n in (4, 2)]
    for grad_logits, rows in parts:
        gradient.add(grad_logits, rows)
    wanted = 1 + sum(grad.double().t() @ rows.double() for grad, rows in parts)
    assert (weight.main_grad - wanted).abs().max() < 0.05
    dummy = gradient.result()
    assert weight.grad_added_to_main_grad
    assert (dummy is not None) == overlaps
    if dummy is not None:
        assert dummy.shape == weight.shape
        assert dummy.dtype == weight.dtype
        assert not tied or not dummy.any()


def test_apexs_accumulating_product_is_used_where_megatron_fuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in with apex's signature (input, grad of the output, main_grad); the real one is CUDA."""

    def accumulate(rows: Tensor, grad_logits: Tensor, total: Tensor) -> None:
        total += grad_logits.float().t() @ rows.float()

    stand_in = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    from parallel.layers import output_layer

    monkeypatch.setattr(
        output_layer.megatron_layers, "fused_weight_gradient_mlp_cuda", stand_in, raising=False
    )
    weight: Any = torch.nn.Parameter(torch.randn(5, 3))
    weight.main_grad = torch.zeros(5, 3)
    grad_logits, rows = torch.randn(4, 5), torch.randn(4, 3)
    MainGradient(weight, fused=True, overlaps=False).add(grad_logits, rows)
    torch.testing.assert_close(weight.main_grad, grad_logits.t() @ rows)
