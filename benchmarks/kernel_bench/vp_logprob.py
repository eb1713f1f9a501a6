"""This module has the cases of `vp_logprob` on one rank: N rows of logits, V vocabulary.

Gradients of both outputs, log-probability and entropy; rows are independent, so 64 of them spread
over the whole are held against fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_bench import eager, peers
from benchmarks.kernel_bench.case import NOT_COMPILED, Case, Outputs, Run, Work, compile_static
from mrl.kernels import oracle, vp_logprob

NUM_CHECKED_ROWS = 64


def build(case: Case, device: torch.device, compile_: bool) -> Work:
    """Build a case. Variants: forward (no gradient), functional, inplace (gradient over the logits)."""
    rng = torch.Generator().manual_seed(0)
    num_rows, vocab = case.shape
    dtype = getattr(torch, case.dtype)
    logits = torch.empty(case.shape, dtype=dtype)
    for rows in logits.split(256):  # in parts: never the whole of it in fp32
        rows.copy_(3 * torch.randn(rows.shape, generator=rng))
    labels = torch.randint(vocab, (num_rows,), generator=rng).to(device)
    grads = [torch.randn(num_rows, generator=rng).to(device), torch.full((num_rows,), 0.01)]
    grads[1] = grads[1].to(device)
    logits = logits.to(device)
    backward = case.variant != "forward"
    leaf = logits.clone().requires_grad_(backward) if backward else logits
    checked = torch.linspace(0, num_rows - 1, min(NUM_CHECKED_ROWS, num_rows)).long().to(device)
    options = {"inplace_backward": True} if case.variant == "inplace" else {}

    def restore() -> None:
        if backward:
            with torch.no_grad():
                leaf.copy_(logits)

    def rival(function: Any, **options: Any) -> Run:
        def run() -> Outputs:
            with torch.set_grad_enabled(backward):
                logprobs, entropy = function(leaf, labels, **options)
            outputs = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
            if backward:
                given = [g.to(o.dtype) for g, o in zip(grads, (logprobs, entropy), strict=True)]
                (outputs["grad"],) = torch.autograd.grad([logprobs, entropy], leaf, given)
            return outputs

        return run

    negative_logprob = peers.liger_cross_entropy(device.type)
    liger: Run | str = "Liger-Kernel computes its gradient in the forward"
    if isinstance(negative_logprob, str):
        liger = negative_logprob
    elif backward:

        def run_liger() -> Outputs:
            loss = negative_logprob(leaf, labels)
            torch.autograd.grad(loss, leaf, -grads[0])
            return {"logprobs": -loss.detach()}

        liger = run_liger

    trl = peers.trl_logprob()
    compiled = compile_static(eager.logprob) if compile_ else None
    # A gradient in the logits' dtype is off by half a unit in its last place.
    rounding = torch.finfo(dtype).eps / 2
    return Work(
        kernel=rival(vp_logprob, **options),
        eager=rival(eager.logprob),
        expected=lambda: exact_outputs(
            logits[checked], labels[checked], [g[checked] for g in grads] if backward else []
        ),
        tolerance={"logprobs": 1e-5, "entropy": 1e-5, "grad": 1e-5 + 1.01 * rounding},
        floor_bytes=logits.nbytes * (3 if backward else 1),
        compiled=rival(compiled) if compiled else NOT_COMPILED,
        liger=liger,
        trl=trl if isinstance(trl, str) else rival(trl),
        prepare=restore,
        rows=checked,
    )


def exact_outputs(logits: Tensor, labels: Tensor, grads: list[Tensor]) -> Outputs:
    """Return the oracle's outputs in fp64, with `grad` where `grads`, of both outputs, are given."""
    exact = logits.double().requires_grad_(bool(grads))
    outputs = oracle.vp_logprob(exact, labels)
    found: Outputs = {"logprobs": outputs[0].detach(), "entropy": outputs[1].detach()}
    if grads:
        given = [grad.double() for grad in grads]
        (found["grad"],) = torch.autograd.grad(list(outputs), exact, given)
    return found


def cases(quick: bool, cuda: bool) -> list[Case]:
    if quick:
        shape, rounds = (6, 300), 2
        return [
            Case("vp_logprob", variant, shape, dtype, build, num_rounds=rounds)
            for variant in ("forward", "functional", "inplace")
            for dtype in ("bfloat16", "float32")
        ]
    rounds = 25 if cuda else 5
    large, small = ((8192, 151936), (4096, 151936)) if cuda else ((4096, 32768), (1024, 32768))
    found = []
    for shape, dtype in ((large, "bfloat16"), (small, "float32")):
        for variant in ("forward", "functional", "inplace"):
            found.append(Case("vp_logprob", variant, shape, dtype, build, num_rounds=rounds))
    if not cuda:
        found.append(Case("vp_logprob", "inplace", large, "bfloat16", build, 2, rounds))
    return found
