"""`algorithm.importance` reaches the loss: against the fp64 oracle, with each algorithm's own clip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.algorithms import load_algorithm
from mrl.config import AlgorithmConfig
from mrl.kernels import Clip, ImportanceWeight
from mrl.kernels.oracle import policy_loss as oracle_loss
from mrl.types import LossOutput, MicroBatch

ALGORITHMS = {"grpo": ("token", 0.2, 0.2), "gspo": ("sequence", 3e-4, 4e-4)}
LENGTHS = [6, 3, 11]
USUAL = {
    ("tis", "token"): (0.0, 2.0),
    ("tis", "sequence"): (0.0, 2.0),
    ("mis", "token"): (0.5, 5.0),
    ("mis", "sequence"): (0.999, 1.002),
}


def batch_of_old_tokens() -> tuple[Tensor, MicroBatch]:
    """Sequences whose second half was sampled by far older weights than the first."""
    rng = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    old = -torch.rand(num_tokens, generator=rng)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    half = positions > torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS)) // 2
    gap = torch.randn(num_tokens, generator=rng) * torch.where(half, 1.5, 1e-3)
    logprobs = (old + 0.1 * torch.randn(num_tokens, generator=rng)).requires_grad_()
    return logprobs, MicroBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.long),
        position_ids=positions,
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        loss_mask=positions > 0,
        rollout_logprobs=old - gap,
        rewards=torch.tensor([1.0, 0.0, 0.5]),
        advantages=torch.tensor([1.0, -2.0, 0.5]),
        seq_weight=torch.tensor([0.5, 0.25, 0.1]),
        old_logprobs=old,
    )


def gradient(logprobs: Tensor, loss: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logprobs)
    return found


def value(output: LossOutput, name: str) -> float:
    mean = output.stats[name]
    return float(mean.total / mean.count)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("kind", "level"), USUAL)
@pytest.mark.parametrize("ends", [None, (0.8, 1.1)])
def test_weights_are_the_oracles(name, kind, level, ends) -> None:
    low, high = ends or USUAL[kind, level]
    given = {} if ends is None else {"importance_low": low, "importance_high": high}
    config = AlgorithmConfig(importance=kind, importance_level=level, **given)
    logprobs, batch = batch_of_old_tokens()
    output = load_algorithm(name).loss(logprobs, batch, config)
    ratio, clip_low, clip_high = ALGORITHMS[name]
    exact = logprobs.detach().double().requires_grad_()
    expected = oracle_loss(
        exact, batch.old_logprobs, batch.loss_mask, batch.cu_seqlens,
        batch.advantages, batch.seq_weight, ratio=ratio,
        clip=Clip("ppo", low=clip_low, high=clip_high),
        rollout_logprobs=batch.rollout_logprobs,
        importance=ImportanceWeight(kind, level, low, high),
    )  # fmt: skip
    torch.testing.assert_close(output.loss_sum.detach(), expected.loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradient(logprobs, output.loss_sum).double(), gradient(exact, expected.loss),
        rtol=1e-5, atol=1e-8,
    )  # fmt: skip
    count = expected.stats["weight_count"]
    mean, outside = expected.stats["weight_sum"] / count, expected.stats["truncated_count"] / count
    assert value(output, "importance/mean") == pytest.approx(mean, rel=1e-6)
    assert value(output, "importance/clip_frac") == pytest.approx(outside)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_it_the_engines_logprobs_change_nothing(name) -> None:
    logprobs, batch = batch_of_old_tokens()
    output = load_algorithm(name).loss(logprobs, batch, AlgorithmConfig())
    spoiled = MicroBatch(**{**vars(batch), "rollout_logprobs": batch.rollout_logprobs * torch.nan})
    again = load_algorithm(name).loss(logprobs, spoiled, AlgorithmConfig())
    assert torch.equal(output.loss_sum, again.loss_sum)
    assert not any(key.startswith("importance/") for key in output.stats)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_token_of_older_weights_counts_by_its_own_ratio(name) -> None:
    """Tokens that the present weights find e times as likely as those that sampled them weigh e."""
    logprobs, batch = batch_of_old_tokens()
    late = batch.position_ids > 2
    rollout = batch.old_logprobs - late.float()
    batch = MicroBatch(**{**vars(batch), "rollout_logprobs": rollout})
    free = AlgorithmConfig(clip_low=0.99, clip_high=100.0)
    config = free.model_copy(update={"importance": "tis", "importance_high": 10.0})
    algorithm = load_algorithm(name)
    plain, weighted = (
        gradient(logprobs, algorithm.loss(logprobs, batch, c).loss_sum) for c in (free, config)
    )
    expected = torch.where(late & batch.loss_mask, torch.e, 1.0) * plain
    torch.testing.assert_close(weighted, expected, rtol=1e-5, atol=1e-9)
