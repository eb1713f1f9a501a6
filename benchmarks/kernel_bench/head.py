"""This module has the cases of the head: log-probs and entropy of N hidden states, vocabulary V, in
chunks of 1,024.

`eager` is mrl's own head of whole logits, as `train.logprob_chunk_tokens: 0` runs it: one product with
the weight, then `vp_logprob`, whose gradient is written over the logits. So `vs_eager` is what holding
no logits costs or saves in time, and the two `peak_bytes` are the memory after and before. Every row is
a loss token; where prompts are part of the rows, the chunked head is faster by their share.

The gradient of the weight is added to an fp32 buffer by both, as Megatron's DDP keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_bench.case import Case, Outputs, Work
from mrl.kernels import Chunked, linear_logprob, oracle, vp_logprob
from mrl.kernels.linear_logprob import add_product

CHUNK_ROWS = 1024
NUM_CHECKED_ROWS = 16


class Buffer:
    """A buffer stands for Megatron's fp32 gradient buffer of the weight."""

    def __init__(self, main_grad: Tensor) -> None:
        self._main_grad = main_grad

    def add(self, grad_logits: Tensor, rows: Tensor) -> None:
        add_product(self._main_grad, grad_logits, rows)

    def result(self) -> None:
        return None


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    """Shape: N rows, hidden size, V. Variants: forward (no gradient) and training."""
    rng = torch.Generator().manual_seed(0)
    num_rows, hidden_size, vocab = case.shape
    dtype = getattr(torch, case.dtype)
    training = case.variant == "training"

    def drawn(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=rng)).to(device, dtype)

    hidden = drawn(num_rows, hidden_size, scale=1.0).requires_grad_(training)
    weight = drawn(vocab, hidden_size, scale=3 / hidden_size**0.5).requires_grad_(training)
    labels = torch.randint(vocab, (num_rows,), generator=rng).to(device)
    rows = torch.arange(num_rows, device=device)
    upstream = torch.randn(num_rows, generator=rng).to(device)
    main_grad = torch.zeros(vocab, hidden_size, device=device) if training else torch.zeros(0)
    checked = torch.linspace(0, num_rows - 1, min(NUM_CHECKED_ROWS, num_rows)).long().to(device)
    how = Chunked(
        min(CHUNK_ROWS, max(1, num_rows // 2)),
        1.0,
        None,
        weight_gradient=lambda _: Buffer(main_grad),
    )

    def chunked() -> Outputs:
        with torch.set_grad_enabled(training):
            logprobs, entropy = linear_logprob(hidden, weight, labels, rows, how)
        outputs = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
        if training:
            outputs["grad"], _ = torch.autograd.grad(
                logprobs, (hidden, weight), upstream, allow_unused=True
            )
        return outputs

    def whole() -> Outputs:
        with torch.set_grad_enabled(training):
            logits = hidden @ weight.t()
            logprobs, entropy = vp_logprob(logits, labels, inplace_backward=training)
            del logits
        outputs = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
        if training:
            outputs["grad"], of_weight = torch.autograd.grad(logprobs, (hidden, weight), upstream)
            main_grad.add_(of_weight)
        return outputs

    # A logit in the dtype's precision, and for the gradient those of the whole row.
    bit = torch.finfo(dtype).eps
    reason = "the head is compared with that of whole logits alone"
    products: dict[str, Any] = {"compiled": reason, "liger": reason, "trl": reason}
    return Work(
        kernel=chunked,
        eager=whole,
        expected=lambda: exact_outputs(
            hidden[checked], weight, labels[checked], upstream[checked] if training else None
        ),
        tolerance={"logprobs": 1e-5 + bit, "entropy": 1e-5 + bit, "grad": 1e-5 + 2 * bit},
        floor_bytes=weight.nbytes * (4 if training else 1),
        prepare=lambda: None,
        rows=checked,
        **products,
    )


def exact_outputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor | None
) -> Outputs:
    """Return the oracle's outputs in fp64, with `grad` where the gradient of the log-probs is given.

    The logits are rounded to the dtype of `hidden`, as those of a head are.
    """
    exact = hidden.detach().double().requires_grad_(upstream is not None)
    logits = (exact @ weight.detach().double().t()).to(hidden.dtype).double()
    outputs = oracle.vp_logprob(logits, labels)
    found: Outputs = {"logprobs": outputs[0].detach(), "entropy": outputs[1].detach()}
    if upstream is not None:
        (found["grad"],) = torch.autograd.grad(outputs[0], exact, upstream.double())
    return found


def cases(quick: bool, cuda: bool) -> list[Case]:
    if quick:
        return [
            Case("linear_logprob", variant, (6, 16, 300), "float32", build, num_rounds=2)
            for variant in ("forward", "training")
        ]
    if cuda:
        shapes, rounds = (((8192, 2048, 151936), "bfloat16"), ((8192, 4096, 32768), "bfloat16")), 10
    else:
        shapes = (
            ((4096, 64, 32768), "float32"),
            ((4096, 64, 32768), "bfloat16"),
            ((3072, 64, 151936), "float32"),
        )
        rounds = 3
    return [
        Case("linear_logprob", variant, shape, dtype, build, num_rounds=rounds)
        for shape, dtype in shapes
        for variant in ("forward", "training")
    ]
