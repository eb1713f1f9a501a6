"""This module shows each cause of a difference by itself, as SGLang and the trainer compute it, and
mended.

It needs no engine.

Shapes are small; what differs is the order of a sum or the place of a rounding, not the size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.kernels import invariant
from mrl.kernels.vp_logprob import vp_logprob
from studies.on_policy_layers.compare import Difference, compare


@dataclass(frozen=True)
class Cause:
    """`off`: the two ways as they are. `mended`: both under rollout.true_on_policy."""

    what: str
    off: Difference
    mend: str
    mended: Difference | None = None
    """None where the mend is that both sides call the same function of torch."""


def causes() -> list[Cause]:
    """Return the causes in the order in which a token meets them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [_norm(), _product(), _attention(), _gate(), _activation(), *_experts(), *_logprob()]


def _norm() -> Cause:
    x, weight = torch.randn(100, 64), torch.rand(64)
    theirs = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return Cause(
        "RMSNorm: the formula in torch ops against F.rms_norm",
        compare(theirs, F.rms_norm(x, (64,), weight, 1e-6)),
        "F.rms_norm on both sides: row by row already",
    )


def _product() -> Cause:
    x, weight = torch.randn(100, 64), torch.randn(128, 64)

    def by_rows(product) -> Difference:
        return compare(torch.cat([product(row, weight) for row in x.split(1)]), product(x, weight))

    return Cause(
        "a matrix product: rows one at a time against all 100",
        by_rows(F.linear),
        "invariant.linear",
        by_rows(invariant.linear),
    )


def _attention() -> Cause:
    num = 100
    q, k, v = torch.randn(num, 4, 16), torch.randn(num, 2, 16), torch.randn(num, 2, 16)
    first, count = torch.zeros(num, dtype=torch.int32), torch.arange(1, num + 1).int()

    def torch_way(q: Tensor, seen: int, causal: bool) -> Tensor:
        batch = [x.transpose(0, 1).unsqueeze(0) for x in (q, k[:seen], v[:seen])]
        out = F.scaled_dot_product_attention(
            batch[0], batch[1], batch[2], is_causal=causal, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    decoded = torch.cat([torch_way(q[t : t + 1], t + 1, False) for t in range(num)])
    ours = torch.cat(
        [
            invariant.attention(
                q[t : t + 1], k[: t + 1], v[: t + 1], first[:1], count[t : t + 1], 0.25
            )
            for t in range(num)
        ]
    )
    return Cause(
        "attention: one query over its keys against all 100 (torch's flash kernel for CPUs)",
        compare(decoded, torch_way(q, num, True)),
        "invariant.attention",
        compare(ours, invariant.attention(q, k, v, first, count, 0.25)),
    )


def _gate() -> Cause:
    logits = torch.randn(100, 8)
    shares, ids = logits.softmax(-1).topk(2)
    theirs = shares / shares.sum(-1, keepdim=True)
    return Cause(
        "router weights: softmax over all, then renormalised, against softmax over the chosen",
        compare(theirs, logits.gather(1, ids).softmax(-1)),
        "the plugin's router is Megatron's",
    )


def _activation() -> Cause:
    x = torch.randn(100, 40)  # not a whole number of torch's vectors
    return Cause(
        "SiLU of 40 columns: rows one at a time against all (32 columns and their multiples agree)",
        compare(torch.cat([F.silu(row) for row in x.split(1)]), F.silu(x)),
        "invariant.silu",
        compare(torch.cat([invariant.silu(row) for row in x.split(1)]), invariant.silu(x)),
    )


def _experts() -> list[Cause]:
    inner, down, weight = torch.randn(100, 32), torch.randn(64, 32), torch.rand(100, 1)
    after = invariant.linear(inner, down) * weight
    parts = torch.randn(4, 100, 64) * torch.rand(4, 100, 1)
    by_number = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    by_weight = ((parts[2] + parts[0]) + parts[3]) + parts[1]
    return [
        Cause(
            "an expert's weight: times what comes out of its last product against what goes in",
            compare(after, invariant.linear(inner * weight, down)),
            "the plugin's experts are Megatron's",
        ),
        Cause(
            "4 experts of a token added by weight against by number (2 would agree)",
            compare(by_weight, by_number),
            "the plugin adds by number, as Megatron does",
        ),
    ]


def _logprob() -> list[Cause]:
    logits, ids = torch.randn(100, 128) * 3, torch.randint(0, 128, (100,))
    ours, _ = vp_logprob(logits, ids)
    alone = torch.cat(
        [vp_logprob(*pair)[0] for pair in zip(logits.split(1), ids.split(1), strict=True)]
    )

    def chosen(values: Tensor) -> Tensor:
        return values.gather(1, ids[:, None])[:, 0]

    return [
        Cause(
            "log-prob: log of softmax against the trainer's kernel",
            compare(chosen(logits.softmax(-1).log()), ours),
            "vp_logprob on both sides: rows one at a time against all",
            compare(alone, ours),
        ),
        Cause(
            "log-prob: log_softmax against the trainer's kernel",
            compare(chosen(logits.log_softmax(-1)), ours),
            "the same",
        ),
    ]
