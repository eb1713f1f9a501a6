"""`linear_logprob` against fp64 and against `vp_logprob` of whole logits: values, gradients, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.kernel_bench.timing import peak_bytes
from mrl.kernels import Chunked, linear_logprob, oracle, vp_logprob


def made(num_rows: int, hidden: int, vocab: int, num_wanted: int, dtype: torch.dtype) -> Any:
    """Hidden states, weight, labels, wanted rows, and upstream gradients of both results."""
    rng = torch.Generator().manual_seed(num_rows + vocab + num_wanted)
    states = torch.randn(num_rows, hidden, generator=rng).to(dtype).requires_grad_()
    weight = (
        (torch.randn(vocab, hidden, generator=rng) * 2 / hidden**0.5).to(dtype).requires_grad_()
    )
    rows = torch.randperm(num_rows, generator=rng)[:num_wanted]
    labels = torch.randint(vocab, (num_wanted,), generator=rng)
    upstream = torch.randn(2, num_wanted, generator=rng)
    return states, weight, labels, rows, upstream


def results(logprobs: Tensor, entropy: Tensor, upstream: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Both values, and the gradient of their sum weighted by `upstream`."""
    weights = upstream.to(logprobs.dtype)
    total = (weights[0] * logprobs + weights[1] * entropy).sum()
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(total, inputs)]


@given(
    num_rows=st.integers(1, 40),
    vocab=st.sampled_from([7, 32, 100, 1504]),
    share=st.floats(0, 1),
    chunk=st.integers(1, 50),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
)
@settings(max_examples=60, deadline=None)
def test_matches_the_oracle(
    num_rows: int, vocab: int, share: float, chunk: int, temperature: float
) -> None:
    num_wanted = int(share * num_rows)
    hidden, weight, labels, rows, upstream = made(num_rows, 12, vocab, num_wanted, torch.float32)
    how = Chunked(chunk, temperature, None)
    got = results(*linear_logprob(hidden, weight, labels, rows, how), upstream, hidden, weight)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = exact[0][rows] @ exact[1].t()
    wanted = oracle.vp_logprob(logits, labels, temperature=temperature)
    for ours, theirs in zip(got, results(*wanted, upstream, *exact), strict=True):
        limit = 3e-6 * max(1.0, float(theirs.abs().max()) if theirs.numel() else 0.0)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3 * limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_matches_the_whole_logits(dtype: torch.dtype, chunk: int) -> None:
    hidden, weight, labels, rows, upstream = made(200, 64, 20_000, 150, dtype)
    whole = vp_logprob(hidden[rows] @ weight.t(), labels, temperature=0.8)
    wanted = results(*whole, upstream, hidden, weight)
    how = Chunked(chunk, 0.8, None)
    got = results(*linear_logprob(hidden, weight, labels, rows, how), upstream, hidden, weight)
    # Values: a last bit of a logit of this size. Gradients: their last bit, and the order of a sum.
    bit = torch.finfo(dtype).eps
    for ours, theirs in zip(got[:2], wanted[:2], strict=True):
        assert (ours - theirs).abs().max() <= max(1e-6 * theirs.abs().max(), 8 * bit)
    for ours, theirs in zip(got[2:], wanted[2:], strict=True):
        assert ours.dtype == dtype
        # A product of one row adds 20,000 terms in another way than one of many.
        limit = max(1e-5 if chunk == 1 else 1e-6, 2 * bit)
        assert (ours - theirs).norm() <= limit * theirs.norm()


def test_rows_that_are_not_wanted_are_not_read() -> None:
    hidden, weight, labels, rows, upstream = made(20, 8, 50, 9, torch.float32)
    others = torch.ones(20, dtype=torch.bool)
    others[rows] = False
    spoilt = hidden.detach().clone()
    spoilt[others] = torch.nan
    spoilt.requires_grad_()
    how = Chunked(4, 1.0, None)
    clean = results(*linear_logprob(hidden, weight, labels, rows, how), upstream, hidden, weight)
    found = results(*linear_logprob(spoilt, weight, labels, rows, how), upstream, spoilt, weight)
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))
    assert not found[2][others].any()


def test_memory_is_that_of_a_chunk_and_of_the_gradients() -> None:
    """The formula of docs/kernels.md; all logits would be 16 MiB."""
    num_rows, hidden_size, vocab, chunk = 1024, 32, 4096, 64
    hidden, weight, labels, rows, _ = made(num_rows, hidden_size, vocab, num_rows, torch.float32)
    logits = chunk * vocab * 4
    tiles = num_rows * 32 * 4 * 4
    per_row = 64 * num_rows
    how = Chunked(chunk, 1.0, None)

    def forward() -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logprobs": linear_logprob(hidden, weight, labels, rows, how)[0]}

    def backward() -> dict[str, Tensor]:
        logprobs, _ = linear_logprob(hidden, weight, labels, rows, how)
        grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        return dict(zip(("hidden", "weight"), grads, strict=True))

    cpu = torch.device("cpu")
    assert logits < peak_bytes(forward, cpu) < 1.1 * (logits + tiles + per_row)
    gradients = 4 * hidden_size * (num_rows + vocab)
    assert peak_bytes(backward, cpu) < 1.1 * (logits + tiles + per_row + gradients)
    # The measure sees whole logits too.
    whole = Chunked(num_rows, 1.0, None)

    def at_once() -> dict[str, Tensor]:
        return {"logprobs": linear_logprob(hidden, weight, labels, rows, whole)[0]}

    assert peak_bytes(at_once, cpu) > num_rows * vocab * 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"how": Chunked(0, 1.0, None)}, "chunk_rows: got 0"),
        ({"how": Chunked(4, 0.0, None)}, "temperature: got 0.0"),
        ({"weight": torch.randn(50, 9)}, r"hidden, weight: got \[20, 8\], \[50, 9\]"),
        ({"labels": torch.zeros(8, dtype=torch.int64)}, r"labels: got torch.int64 \[8\]"),
        ({"rows": torch.zeros(9)}, "rows: got torch.float32"),
        ({"labels": torch.full((9,), 50)}, "50"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], named: str) -> None:
    hidden, weight, labels, rows, _ = made(20, 8, 50, 9, torch.float32)
    given = {"hidden": hidden, "weight": weight, "labels": labels, "rows": rows}
    arguments: Any = {**given, "how": Chunked(4, 1.0, None), **change}
    with pytest.raises(ValueError, match=named):
        linear_logprob(**arguments)
