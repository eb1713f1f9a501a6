"""This module times mrl's own layers beside what they replace, on one device, as a part of run.py.

Each pair is run by turns after a warm-up; figures are medians of seconds, and the most bytes that torch
held on a GPU. A pair that cannot run here says why, in `not_measured`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_lane.parts import model_folder, note
from moe.routes import Replay

ROUNDS = 5
TOKENS = {"cuda": (64, 512), "cpu": (4, 32)}
"""(sequences, tokens of each) of a training pass and of attention."""
HEADS = (16, 4, 64)
"""Query heads, groups of keys and values, and head size of the attention case."""
HEAD_SIZES = {"cuda": (8192, 2048, 151_936), "cpu": (64, 32, 1000)}
"""Rows, hidden size and vocabulary of the head case."""
CHUNK_ROWS = {"cuda": 1024, "cpu": 16}
ADAM_TENSORS = {"cuda": (200, 1 << 20), "cpu": (8, 1 << 12)}
"""Number of tensors and elements of each in the optimizer case."""

Pass = Callable[[], object]


@functools.cache
def one_process() -> Any:
    """Return the mesh of a model on this device alone."""
    from mrl.config import ParallelConfig
    from parallel import prepare
    from parallel.dims import ParallelDims
    from parallel.mesh import init_mesh

    prepare()
    return init_mesh(ParallelDims.create(ParallelConfig(), 1), 0)


def native(folder: Path, device: str) -> dict[str, Any]:
    """Experts, attention, head and optimizer; `ratio` is the time of what was replaced over ours."""
    place = torch.device(device)
    said = []
    pairs: dict[str, Callable[[], dict[str, Pass] | str]] = {
        "experts": lambda: experts(folder, place),
        "attention": lambda: attention(place),
        "head": lambda: head(place),
        "adam": lambda: adam(place),
    }
    for name, make in pairs.items():
        passes = make()
        if isinstance(passes, str):
            note(**{name: {"not_measured": passes}})
            said.append(f"{name}: {passes}")
            continue
        found = by_turns(passes, place)
        note(**{name: found})
        said.append(f"{name} {found['ratio']:.2f}x")
    return {"says": ", ".join(said)}


def by_turns(passes: dict[str, Pass], device: torch.device) -> dict[str, Any]:
    """The first of two passes is ours."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    peaks: dict[str, int] = {}
    for number in range(1 + ROUNDS):
        for name, act in passes.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            act()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                peaks[name] = torch.cuda.max_memory_allocated(device)
            if number:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ours, other = medians.values()
    return {"seconds": medians, "ratio": other / ours, "peak_bytes": peaks}


def experts(folder: Path, device: torch.device) -> dict[str, Pass]:
    """Time a training step of the whole model: experts as grouped products, and one after the other."""
    from benchmarks.kernel_bench.training_step import loop_over_experts, loss, make_batch
    from mrl.config import ModelConfig, OptimizerConfig
    from parallel.hf_config import HfModel

    mesh = one_process()
    from parallel.policy import Policy

    path = model_folder(folder, device.type)
    model = HfModel.read(path)
    sizes, topk = model.sizes, model.config["num_experts_per_tok"]
    generator = torch.Generator().manual_seed(0)
    shape = TOKENS[device.type]
    ids = torch.randint(0, model.config["vocab_size"], shape, generator=generator)
    scores = torch.rand(
        *shape, len(model.moe_layer_numbers), sizes.num_experts, generator=generator
    )
    routes = scores.topk(topk).indices.to(torch.uint8)
    found: dict[str, Pass] = {}
    for name in ("grouped", "loop"):
        config = ModelConfig(path=str(path), transformer_impl="local")
        policy = Policy(
            model, mesh, config, OptimizerConfig(lr=1e-6), recompute=False, temperature=1.0
        )
        if name == "loop":
            loop_over_experts(policy)
        batch = make_batch(policy, ids, routes, sizes.num_experts)
        found[name] = partial(policy.train_step, batch, loss, replay=Replay.rollout)
    return found


def attention(device: torch.device) -> dict[str, Pass] | str:
    """Forward and backward of packed attention: torch's FlashAttention of packed sequences, and buckets
    of scaled_dot_product_attention."""
    mesh = one_process()
    from parallel.context import context_slice
    from parallel.layers import attention as module

    lengths = torch.randint(64, 2048, (48,), generator=torch.Generator().manual_seed(0))
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed = module.packed_sequences(bounds, context_slice(bounds, mesh.cp, device), device)
    heads, kv_groups, size = HEADS
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(count: int) -> Tensor:
        shape = (int(bounds[-1]), count, size)
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    query, key, value = random(heads), random(kv_groups), random(kv_groups)
    if not module.takes_varlen(query, value, packed):
        return "this torch, or this device, has no packed FlashAttention for it"
    layer = module.PackedAttention(SimpleNamespace(attention_dropout=0.0), 1, None, "self")
    weights = torch.randn_like(query)

    def attend() -> None:
        (layer.attend(query, key, value, packed) * weights).sum().backward()

    def attend_in_buckets() -> None:
        with mock.patch.object(module, "takes_varlen", return_value=False):
            attend()

    return {"varlen": attend, "buckets": attend_in_buckets}


def head(device: torch.device) -> dict[str, Pass]:
    """Log-probs, entropies and their gradients: in chunks of tokens, and from all logits."""
    from mrl.kernels import Chunked, linear_logprob, vp_logprob

    num_rows, hidden_size, vocab_size = HEAD_SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(num_rows, hidden_size, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, device=device, dtype=dtype)
    weight = weight.mul_(hidden_size**-0.5).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_rows,), device=device)
    rows = torch.arange(num_rows, device=device)
    how = Chunked(CHUNK_ROWS[device.type], 1.0, None)

    def chunked() -> None:
        logprobs, entropy = linear_logprob(hidden, weight, labels, rows, how)
        (logprobs + 0.01 * entropy).sum().backward()

    def whole() -> None:
        wanted = torch.ones_like(labels, dtype=torch.bool)
        logits = torch.nn.functional.linear(hidden, weight)
        logprobs, entropy = vp_logprob(logits, labels, wanted, inplace_backward=True)
        (logprobs + 0.01 * entropy).sum().backward()

    return {"chunked": chunked, "whole": whole}


def adam(device: torch.device) -> dict[str, Pass]:
    """Time a step of torch's AdamW: fused, and as lists of tensors (`foreach`)."""
    count, size = ADAM_TENSORS[device.type]
    found: dict[str, Pass] = {}
    for name in ("fused", "foreach"):
        tensors = [torch.randn(size, device=device) for _ in range(count)]
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        found[name] = torch.optim.AdamW(parameters, lr=1e-6, **{name: True}).step  # pyright: ignore[reportArgumentType]
    return found
