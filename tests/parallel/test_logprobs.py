"""Log-probs of packed micro-batches on real tensor-parallel ranks: TP1, TP2 and TP4, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.kernels import oracle
from mrl.types import MicroBatch
from parallel.context import ContextSlice
from parallel.logprobs import packed_logprobs
from tests.ranks import run_ranks

LENGTHS = [5, 1, 9, 20]
TEMPERATURE = 0.8


def make_batch(vocab: int) -> MicroBatch:
    rng = torch.Generator().manual_seed(0)
    n, b = sum(LENGTHS), len(LENGTHS)
    return MicroBatch(
        input_ids=torch.randint(vocab, (n,), generator=rng),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        # The very first token of some sequences too: nothing predicts those.
        loss_mask=torch.rand(n, generator=rng) < 0.7,
        rollout_logprobs=torch.zeros(n),
        rewards=torch.ones(b),
        seq_weight=torch.ones(b),
    )


def make_logits(vocab: int, dtype: torch.dtype) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return (3 * torch.randn(sum(LENGTHS), vocab, generator=rng)).to(dtype)


def on_rank(vocab: int) -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    result = {}
    for dtype in (torch.float32, torch.bfloat16):
        local = make_logits(vocab, dtype).chunk(size, dim=1)[rank].contiguous().requires_grad_()
        logprobs, entropy = packed_logprobs(
            local * 1, make_batch(vocab), TEMPERATURE, group, ContextSlice(group, [])
        )
        weights = torch.linspace(-1, 1, len(logprobs))
        (grad,) = torch.autograd.grad((weights * (logprobs + 0.1 * entropy)).sum(), local)
        result |= {f"{dtype} logprobs": logprobs.detach(), f"{dtype} entropy": entropy.detach()}
        result[f"{dtype} grad"] = grad
    return result


@pytest.mark.parametrize("vocab", [64, 4096])
def test_ranks_change_no_bit(vocab: int, tmp_path: Path) -> None:
    runs: dict[int, list[dict[str, Any]]] = {
        size: run_ranks(size, on_rank, vocab, folder=tmp_path / str(size)) for size in (1, 2, 4)
    }
    (one,) = runs[1]
    for size in (2, 4):
        for name, wanted in one.items():
            parts = [result[name] for result in runs[size]]
            if name.endswith("grad"):
                assert torch.equal(torch.cat(parts, dim=1), wanted), (size, name)
            else:
                assert all(torch.equal(part, wanted) for part in parts), (size, name)


def test_each_loss_token_gets_its_own_row(tmp_path: Path) -> None:
    """The row before it in its sequence; masked tokens and the first of a sequence get 0."""
    (got,) = run_ranks(1, on_rank, 64, folder=tmp_path / "one")
    batch, logits = make_batch(64), make_logits(64, torch.float32)
    starts = batch.cu_seqlens[:-1].tolist()
    assert any(batch.loss_mask[start] for start in starts), "the case should have such a token"
    for t in range(sum(LENGTHS)):
        wanted = (0.0, 0.0)
        if batch.loss_mask[t] and t not in starts:
            label = batch.input_ids[t : t + 1]
            values = oracle.vp_logprob(logits[t - 1 : t], label, temperature=TEMPERATURE)
            wanted = (float(values[0]), float(values[1]))
        assert abs(float(got["torch.float32 logprobs"][t]) - wanted[0]) < 2e-6
        assert abs(float(got["torch.float32 entropy"][t]) - wanted[1]) < 2e-6
