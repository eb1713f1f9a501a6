"""Log-probs of truncated distributions against fp64: values and gradients, alone and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from mrl.kernels import Chunked, linear_logprob, oracle
from mrl.sampling_mask import SamplingMask
from tests.ranks import run_ranks

TEMPERATURE = 0.8


def made(num_rows: int, vocab: int, most: int, dtype: torch.dtype = torch.float32) -> Any:
    """Hidden states, weight, labels, and the tokens that each label was drawn from."""
    rng = torch.Generator().manual_seed(num_rows + vocab + most)
    states = torch.randn(num_rows, 12, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 12, generator=rng).to(dtype).requires_grad_()
    sizes = torch.randint(1, most + 1, (num_rows,), generator=rng).tolist()
    sets = [torch.randperm(vocab, generator=rng)[:size].tolist() for size in sizes]
    places = [int(torch.randint(size, (1,), generator=rng)) for size in sizes]
    labels = torch.tensor([tokens[i] for tokens, i in zip(sets, places, strict=True)]).long()
    return states, weight, labels, sets


def results(
    states: Tensor, weight: Tensor, logprobs: Tensor, entropy: Tensor, entropy_coef: float
) -> list[Tensor]:
    """Log-probs, and the gradients of a weighted sum of them and the entropies."""
    upstream = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    total = (upstream * (logprobs + entropy_coef * entropy)).sum()
    return [logprobs.detach(), *torch.autograd.grad(total, (states, weight))]


def exact(
    states: Tensor, weight: Tensor, labels: Tensor, sets: list[list[int]], entropy_coef: float
) -> list[Tensor]:
    inputs = [t.detach().double().requires_grad_() for t in (states, weight)]
    logits = inputs[0] @ inputs[1].t()
    logprobs = oracle.truncated_logprob(logits, labels, sets, temperature=TEMPERATURE)
    _, entropy = oracle.vp_logprob(logits, labels, temperature=TEMPERATURE)
    return results(*inputs, logprobs, entropy, entropy_coef)


def ours(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    sets: list[list[int]],
    entropy_coef: float,
    chunk: int = 5,
    group: ProcessGroup | None = None,
) -> list[Tensor]:
    rows = torch.arange(len(labels))
    kept = SamplingMask.of(sets).rows(rows)
    how = Chunked(chunk, TEMPERATURE, group)
    found = linear_logprob(states, weight, labels, rows, how, kept)
    return results(states, weight, *found, entropy_coef)


@given(
    num_rows=st.integers(1, 20),
    vocab=st.sampled_from([8, 100, 1504]),
    most=st.integers(1, 8),
    chunk=st.integers(1, 25),
    entropy_coef=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=30, deadline=None)
def test_matches_the_oracle(
    num_rows: int, vocab: int, most: int, chunk: int, entropy_coef: float
) -> None:
    inputs = made(num_rows, vocab, most)
    got = ours(*inputs, entropy_coef, chunk)
    for mine, theirs in zip(got, exact(*inputs, entropy_coef), strict=True):
        limit = 5e-6 * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=limit)


@pytest.mark.parametrize("level", [0.0, 30.0, 1000.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_level_of_the_logits_costs_no_accuracy(level: float, temperature: float) -> None:
    """The logits are those of an identity, so their fp32 values are the oracle's, too."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(400, 64, generator=rng) + level
    kept = torch.stack([torch.randperm(64, generator=rng)[:8] for _ in range(400)])
    labels, rows = kept[:, 3], torch.arange(400)
    wanted = oracle.truncated_logprob(logits, labels, kept.tolist(), temperature=temperature)
    leaf = logits.clone().requires_grad_()
    how = Chunked(100, temperature, None)
    got, _ = linear_logprob(leaf, torch.eye(64), labels, rows, how, kept)
    torch.testing.assert_close(got.detach().double(), wanted, rtol=1e-7, atol=2e-7)
    exactly = logits.double().requires_grad_()
    oracle.truncated_logprob(
        exactly, labels, kept.tolist(), temperature=temperature
    ).sum().backward()
    got.sum().backward()
    assert leaf.grad is not None
    assert exactly.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exactly.grad, rtol=0, atol=1e-6)


def test_rows_without_a_kept_token_give_nan() -> None:
    states, weight, labels, _ = made(3, 40, 3)
    rows, how = torch.arange(3), Chunked(2, TEMPERATURE, None)
    for kept in (torch.full((3, 0), -1), torch.full((3, 2), -1)):
        assert linear_logprob(states, weight, labels, rows, how, kept)[0].isnan().all()


def test_all_tokens_kept_is_the_whole_distribution_and_one_is_certain() -> None:
    states, weight, labels, _ = made(6, 40, 3)
    rows, how = torch.arange(6), Chunked(4, TEMPERATURE, None)
    whole, _ = linear_logprob(states, weight, labels, rows, how)
    kept, _ = linear_logprob(states, weight, labels, rows, how, torch.arange(40).repeat(6, 1))
    torch.testing.assert_close(kept, whole)
    alone = ours(states, weight, labels, [[int(label)] for label in labels], 0.0)
    assert not any(bool(values.any()) for values in alone)


def test_a_label_that_was_not_kept_gives_nan() -> None:
    states, weight, labels, sets = made(4, 40, 3)
    sets[2] = [token for token in range(10) if token != int(labels[2])]
    logprobs = ours(states, weight, labels, sets, 0.0)[0]
    assert logprobs.isnan().tolist() == [False, False, True, False]


def test_half_precision_gradients_are_those_of_fp64_to_their_last_bit() -> None:
    inputs = made(30, 100, 8, torch.bfloat16)
    got, wanted = ours(*inputs, 0.0), exact(*inputs, 0.0)
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).norm() <= 0.02 * theirs.norm()


def on_rank() -> list[Tensor]:
    """Each rank has half of the vocabulary; the caller sums the gradient of the states."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    states, weight, labels, sets = made(20, 64, 8)
    local = weight.detach().chunk(group.size())[group.rank()].clone().requires_grad_()
    logprobs, of_states, of_weight = ours(states, local, labels, sets, 0.3, group=group)
    dist.all_reduce(of_states)
    return [logprobs, of_states, of_weight]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_of_a_vocabulary_match_the_oracle(size: int, tmp_path: Path) -> None:
    ranks = run_ranks(size, on_rank, folder=tmp_path)
    wanted = exact(*made(20, 64, 8), 0.3)
    alone = ours(*made(20, 64, 8), 0.3)
    for logprobs, of_states, _ in ranks:
        # Sets lie on both ranks, or on one; the bits are those of one rank.
        assert torch.equal(logprobs, alone[0])
        torch.testing.assert_close(logprobs.double(), wanted[0], rtol=0, atol=5e-6)
        torch.testing.assert_close(of_states.double(), wanted[1], rtol=0, atol=2e-5)
    of_weight = torch.cat([rank[2] for rank in ranks])
    torch.testing.assert_close(of_weight.double(), wanted[2], rtol=0, atol=2e-5)
