"""The losses that a client names, against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.learn.named_losses import LOSSES, MAX_RATIO, LossOptions
from mrl.types import MicroBatch

LENGTHS = (5, 1, 7)
NUM_TOKENS = sum(LENGTHS)


def batch_of(mask: Tensor, factors: Tensor, old: Tensor) -> MicroBatch:
    """Three sequences of other weights, of which the second has no loss token."""
    return MicroBatch(
        input_ids=torch.arange(NUM_TOKENS),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS]),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        loss_mask=mask,
        rollout_logprobs=old,
        rewards=torch.zeros(3),
        seq_weight=torch.tensor([0.5, 1.0, 2.0]),
        old_logprobs=old,
        token_advantages=factors,
    )


@pytest.fixture
def batch() -> MicroBatch:
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(NUM_TOKENS, generator=rng) < 0.7
    mask[[0, 5, 6]] = False
    old = torch.where(mask, -2 * torch.rand(NUM_TOKENS, generator=rng), torch.nan)
    return batch_of(mask, torch.randn(NUM_TOKENS, generator=rng), old)


@pytest.fixture
def logprobs(batch: MicroBatch) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    apart = 1.5 * torch.randn(NUM_TOKENS, generator=rng)
    assert batch.old_logprobs is not None
    return torch.where(batch.loss_mask, batch.old_logprobs + apart, 1.0).requires_grad_()


def by_formula(term: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The weighted sum of `term(logp, old, A)` of each sequence."""

    def loss(logprobs: Tensor, batch: MicroBatch) -> Tensor:
        assert batch.old_logprobs is not None
        assert batch.token_advantages is not None
        total = torch.zeros((), dtype=torch.float64)
        starts = batch.cu_seqlens.tolist()
        for place, end, weight in zip(starts, starts[1:], batch.seq_weight.tolist(), strict=False):
            own = torch.arange(place, end)[batch.loss_mask[place:end]]
            if len(own):
                values = (logprobs, batch.old_logprobs, batch.token_advantages)
                total = total + weight * term(*(each[own].double() for each in values)).sum()
        return total

    return loss


def gspo(logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    s = (logp - old).mean().exp()
    s = s.detach() * (logp - logp.detach()).exp()  # GSPO-token
    return -torch.minimum(s * advantage, s.clamp(0.7, 1.3) * advantage)


def stable(logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logp - old).exp().clamp(max=MAX_RATIO).detach()
    return -ratio * advantage * logp + 0.15 * (logp - old).square()


CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "cross_entropy": ({}, lambda p, o, a: -a * p),
    "linear": ({}, lambda p, o, a: a * p),
    "importance_sampling": ({}, lambda p, o, a: -(p - o).exp() * a),
    "dro": ({"beta": 0.4}, lambda p, o, a: -a * p + 0.2 * (p - o).square()),
    "gspo": ({"clip_low": 0.3, "clip_high": 0.3}, gspo),
    "stable_reinforce": ({"kl_coeff": 0.3}, stable),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_formula(name: str, batch: MicroBatch, logprobs: Tensor) -> None:
    options, term = CASES[name]
    own = {key: value for key, value in options.items() if key.startswith("clip")}
    rest = {key: value for key, value in options.items() if key not in own}
    made = LossOptions(AlgorithmConfig(**own), **rest)
    assert set(options) <= set(LOSSES[name].options)
    found = LOSSES[name].loss(logprobs, batch, made).loss_sum
    (gradient,) = torch.autograd.grad(found, logprobs)
    expected = by_formula(term)(logprobs, batch)
    (wanted,) = torch.autograd.grad(expected, logprobs)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    assert not gradient[~batch.loss_mask].any()  # also where `old` is NaN


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_loss_tokens_is_zero(name: str, logprobs: Tensor) -> None:
    nothing = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    batch = batch_of(nothing, torch.ones(NUM_TOKENS), torch.zeros(NUM_TOKENS))
    found = LOSSES[name].loss(logprobs, batch, LossOptions()).loss_sum
    (gradient,) = torch.autograd.grad(found, logprobs)
    assert float(found) == 0
    assert not gradient.any()


def test_the_bounded_ratio_is_counted(batch: MicroBatch, logprobs: Tensor) -> None:
    assert batch.old_logprobs is not None
    stats: Any = LOSSES["stable_reinforce"].loss(logprobs, batch, LossOptions()).stats
    apart = (logprobs.detach() - batch.old_logprobs)[batch.loss_mask]
    share = stats["ratio/clip_frac"]
    assert int(share.total) == int((apart > math.log(MAX_RATIO)).sum()) > 0
    assert int(share.count) == int(batch.loss_mask.sum())
