"""This module has the cases of a training step: experts as grouped products beside a loop over the
experts.

`kernel` is a step of the policy as mrl trains it, `eager` the same step with Megatron's SequentialMLP,
which calls each expert by itself; all else is shared. Forward, backward, clipping and Adam, at a
learning rate that changes no weight, so that every step computes the same. `expected` is `transformers`
in fp64, whose choice of experts both replay.

Shape: experts, experts per token, hidden size, tokens.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_bench.case import Case, Outputs, Work
from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mrl.types import LossOutput, MicroBatch, RoutingTrace, Sample, TrainBatch, VersionSpan

LENGTH = 128
"""Tokens of a sequence."""
NO_PEER = "training_step: Liger-Kernel and TRL have no experts of their own"
NOT_COMPILED = "training_step: Megatron's pipeline schedule is not compiled"


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    from mrl.toy_model import write_toy_model  # and with it transformers: other cases need neither

    num_experts, topk, hidden, num_tokens = case.shape
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_toy_model(
            model,
            num_experts=num_experts,
            num_experts_per_tok=topk,
            hidden_size=hidden,
            moe_intermediate_size=hidden // 2,
        )
        exact = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float64, experts_implementation="eager"
        )
        policies = [make_policy(model) for _ in range(2)]
    loop_over_experts(policies[1])
    rng = torch.Generator().manual_seed(0)
    shape = (num_tokens // LENGTH, LENGTH)
    ids = torch.randint(0, exact.config.vocab_size, shape, generator=rng)
    batch = make_batch(policies[0], ids, routes_of(exact, ids, topk), num_experts)

    def step(policy: Any) -> Outputs:
        out = policy.train_step(batch, loss, replay=Replay.rollout)
        return {
            "logprobs": out.output.logprobs[0],
            "grad_norm": torch.tensor([out.grad_norm], dtype=torch.float64),
        }

    num_parameters = sum(p.numel() for p in exact.parameters())
    return Work(
        kernel=lambda: step(policies[0]),
        eager=lambda: step(policies[1]),
        expected=lambda: exact_step(exact, ids),
        tolerance={"logprobs": 1e-5, "grad_norm": 1e-5},
        # Weights, gradients and two moments, read and written once.
        floor_bytes=num_parameters * 4 * 8,
        compiled=NOT_COMPILED,
        liger=NO_PEER,
        trl=NO_PEER,
    )


def make_policy(model: Path) -> Any:
    from parallel import prepare

    prepare()
    from parallel.hf_config import HfModel
    from parallel.policy import Policy

    return Policy(
        HfModel.read(model),
        one_process(),
        ModelConfig(path=str(model), dtype="float32", transformer_impl="local"),
        OptimizerConfig(lr=1e-30, weight_decay=0.0),
        recompute=False,
        temperature=1.0,
    )


@functools.cache
def one_process() -> Any:
    from parallel.dims import ParallelDims
    from parallel.mesh import init_mesh

    return init_mesh(ParallelDims.create(ParallelConfig(), 1), seed=0)


def loop_over_experts(policy: Any) -> None:
    from parallel.layers.experts import compute_one_by_one

    for chunk in policy.chunks:
        compute_one_by_one(chunk)


@torch.no_grad()
def routes_of(model: Any, ids: Tensor, topk: int) -> Tensor:
    """ids i64[B, T] -> u8[B, T, L, K]: the experts that the model chooses."""
    logits = model(ids, output_router_logits=True).router_logits
    chosen = [layer.topk(topk).indices.view(*ids.shape, topk) for layer in logits]
    return torch.stack(chosen, dim=2).to(torch.uint8)


def make_batch(policy: Any, ids: Tensor, routes: Tensor, num_experts: int) -> TrainBatch:
    from moe.align import routes_of_trace
    from parallel.packing import WeightedSample, pack

    length = ids.shape[1]
    parts = []
    for row, own in zip(ids, routes, strict=True):
        rows = VersionSpan(0, 0, length - 1)
        trace = RoutingTrace(own[:-1], policy.moe_layers, num_experts, (rows,), 0)
        mask = torch.arange(length) >= 1
        span = (VersionSpan(0, 1, length),)
        sample = Sample(0, row, 1, mask, torch.zeros(length), span, "length", trace)
        parts.append(WeightedSample(sample, 1.0, 1.0, routes=routes_of_trace(trace)))
    return TrainBatch([pack(parts)], ids.numel() - len(ids), len(ids))


def loss(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
    """Return the mean negative log-likelihood."""
    return LossOutput(-logprobs.sum() / batch.num_tokens, {})


def exact_step(model: Any, ids: Tensor) -> Outputs:
    logits = model(ids).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    (-logprobs.sum() / ids.numel()).backward()
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    padded = torch.nn.functional.pad(logprobs.detach(), (1, 0))
    return {"logprobs": padded.flatten(), "grad_norm": torch.stack(squares).sum().sqrt().view(1)}


def cases(quick: bool, cuda: bool) -> list[Case]:
    if cuda:  # a run of the kernels alone; benchmarks/gpu_lane trains whole models there
        return []
    shapes = {
        "toy": (8, 2, 64, 4096),
        "64 experts": (64, 8, 64, 1024),
        "64 experts, wider": (64, 8, 256, 4096),
    }
    if quick:
        shapes = {"toy": (4, 2, 32, 256)}
    return [
        Case("training_step", name, shape, "float32", build, num_rounds=7)
        for name, shape in shapes.items()
    ]
