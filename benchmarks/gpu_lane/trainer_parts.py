"""This module trains without an engine: the first minute of the trainer on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_lane.parts import RECIPE, note, train_overrides
from moe.routes import Replay
from mrl.types import RoutingTrace, Sample, VersionSpan

NUM_SAMPLES = {"cuda": 64, "cpu": 8}
RESPONSE_LEN = {"cuda": 512, "cpu": 32}
ROUNDS = 3
NOISE_BOUND = 0.1
"""Nats: two passes over the same tokens and weights may not differ by more on 99.9% of them."""


def trainer_step(folder: Path, device: str) -> dict[str, Any]:
    """Build, two forward passes, one training step; layers without TransformerEngine.

    The two passes must agree, to the bit if all is deterministic, and the step must be finite. Routes
    are replayed in a second pair of passes: random ones, as an engine would have sent them.
    """
    from benchmarks.training_pass import make_ours
    from mrl.config import load_recipe
    from mrl.learn.batching import make_train_batch
    from mrl.preflight import check
    from parallel import prepare
    from parallel.mesh import destroy_mesh, init_mesh

    prepare()
    overrides = train_overrides(folder, device)
    overrides += ["model.transformer_impl=local", f"output_dir={folder / 'trainer_step'}"]
    plan = check(load_recipe(RECIPE, overrides), 1)
    mesh = init_mesh(plan.dims, plan.recipe.seed)
    start = time.perf_counter()
    ours = make_ours(plan, mesh)
    synchronize(mesh.device)
    note(build_s=round(time.perf_counter() - start, 2), **memory(mesh.device))
    samples = make_samples(plan, device)
    advantages = torch.randn(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    recipe = plan.recipe
    batch = make_train_batch(
        samples,
        advantages,
        plan.algorithm,
        mesh,
        recipe.train.micro_batch_tokens,
        recipe.algorithm,
    )
    old, noise = time_passes(ours, batch.micro_batches, mesh.device)
    batch = replace(batch, micro_batches=[
        replace(micro, old_logprobs=row)
        for micro, row in zip(batch.micro_batches, old, strict=True)
    ])  # fmt: skip
    times, norms = [], []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        norms.append(ours.train_pass(batch))
        synchronize(mesh.device)
        times.append(time.perf_counter() - start)
        note(grad_norms=norms, step_s=times, **memory(mesh.device))
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    destroy_mesh()
    assert torch.isfinite(torch.tensor(norms)).all(), f"grad norms {norms}"
    assert noise["q999"] < NOISE_BOUND, f"two passes differ: {noise}"
    step_s = statistics.median(times[1:])
    same = "equal bits" if noise["max"] == 0 else f"apart by up to {noise['max']:.1e} nats"
    return {
        "num_tokens": num_tokens,
        "says": f"{num_tokens / step_s:.0f} tokens/s trained, grad_norm {norms[0]:.3g}, two passes "
        f"{same}",
    }


def time_passes(
    ours: Any, micros: Sequence[Any], device: torch.device
) -> tuple[list[Tensor], dict[str, float]]:
    """Time passes without and with replay; return the last log-probs and how far two passes differ."""
    old, noise = [], {"max": 0.0, "q999": 0.0}
    for name, replay in (("native", Replay.off), ("replayed", Replay.rollout)):
        passes, seconds = [], []
        for _ in range(1 + ROUNDS):
            start = time.perf_counter()
            found = ours.policy.forward_only(micros, replay).logprobs
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            old = [part.cpu() for part in found]
            passes.append(torch.cat(old))
        noise = difference(passes[-2], passes[-1])
        note(**{f"{name}_first_s": round(seconds[0], 3),
                f"{name}_pass_s": statistics.median(seconds[1:]),
                f"{name}_two_passes": noise})  # fmt: skip
    return old, noise


def make_samples(plan: Any, device: str) -> list[Sample]:
    """Make random tokens with random routes: any K different experts in each layer."""
    generator = torch.Generator().manual_seed(0)
    sizes, layers = plan.model.sizes, plan.model.moe_layer_numbers
    vocab_size, topk = plan.model.config["vocab_size"], plan.model.config["num_experts_per_tok"]
    samples = []
    for number in range(NUM_SAMPLES[device]):
        length = 8 + RESPONSE_LEN[device]
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        scores = torch.rand(length - 1, len(layers), sizes.num_experts, generator=generator)
        rows = (VersionSpan(0, 0, length - 1),)
        chosen = scores.topk(topk).indices.to(torch.uint8)
        trace = RoutingTrace(chosen, layers, sizes.num_experts, rows, 0)
        mask, spans = torch.arange(length) >= 8, (VersionSpan(0, 8, length),)
        samples.append(
            Sample(number // 4, ids, 8, mask, torch.zeros(length), spans, "length", trace)
        )
    return samples


def difference(a: Tensor, b: Tensor) -> dict[str, float]:
    """Return the largest |difference| of two f32[N], and the quantile that all but 0.1% stay below."""
    apart = (a - b).abs().float().sort().values
    return {"max": float(apart[-1]), "q999": float(apart[int(0.999 * (len(apart) - 1))])}


def memory(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
