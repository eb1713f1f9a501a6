"""`vp_logprob` as torch ops, and what it says to bad input."""

from __future__ import annotations

import math
import re

import pytest
import torch

from mrl.kernels import vp_logprob
from tests.kernels.test_vp_logprob import make_logits, run, upstream


@pytest.mark.parametrize("inplace", [False, True])
def test_opcheck(inplace) -> None:
    logits, labels = make_logits(6, 64, torch.float32)
    mask = torch.tensor([True, True, False, True, True, False])
    ops = torch.ops.mrl
    check = torch.library.opcheck
    tiles = ops.vp_logprob_stats(logits, labels, mask, 0, 64, 2, 0.8)
    check(ops.vp_logprob_stats.default, (logits, labels, mask, 0, 64, 2, 0.8))
    _, lse, entropy = ops.vp_logprob_combine(logits, labels, mask, tiles[None], 0, 2, 0.8, False)
    rest = (labels, mask, lse, entropy, *upstream(6), 0, 0.8)
    if inplace:
        check(ops.vp_logprob_bwd_.default, (logits, *rest))
    else:
        check(ops.vp_logprob_bwd.default, (logits, *rest))
        leaf = logits.clone().requires_grad_()
        check(ops.vp_logprob_combine.default, (leaf, labels, mask, tiles[None], 0, 2, 0.8, False))


@pytest.mark.usefixtures("compiles")
def test_compiled_code_calls_the_op() -> None:
    logits, labels = make_logits(6, 64, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(leaf):
        logprobs, entropy = vp_logprob(leaf * 1.0, labels)
        g, g_entropy = upstream_constants
        return (g * logprobs + g_entropy * entropy).sum()

    upstream_constants = upstream(6)
    leaf = logits.clone().requires_grad_()
    step(leaf).backward()
    assert torch.equal(leaf.grad, run(logits, labels)[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(5)}, "logits: got shape [5], expected [T, V_loc]"),
        ({"logits": torch.zeros(4, 10).double()}, "logits: got dtype torch.float64, expected"),
        ({"logits": torch.zeros(10, 4).t()}, "logits: got strides (1, 4), expected contiguous"),
        ({"labels": torch.zeros(3).long()}, "labels: got shape [3], expected [4] (T = 4 rows)"),
        ({"labels": torch.zeros(4).int()}, "labels: got dtype torch.int32, expected torch.int64"),
        ({"labels": torch.tensor([0, 1, 10, 2])}, "labels: got 10 in row 2, expected 0 to 9"),
        ({"labels": torch.tensor([0, -1, 1, 2])}, "labels: got -1 in row 1, expected 0 to 9"),
        ({"mask": torch.ones(5).bool()}, "mask: got shape [5], expected [4]"),
        ({"mask": torch.ones(4)}, "mask: got dtype torch.float32, expected torch.bool or"),
        ({"temperature": 0.0}, "temperature: got 0.0, expected above 0 and finite"),
        ({"temperature": math.nan}, "temperature: got nan, expected above 0 and finite"),
    ],
)
def test_bad_input_is_named(change, message) -> None:
    arguments = {"logits": torch.zeros(4, 10), "labels": torch.zeros(4).long(), "mask": None}
    with pytest.raises(ValueError, match=re.escape(message)):
        vp_logprob(**arguments | change)
