"""RSPO's router-shift weight (arXiv 2510.23027) in the loss: against the fp64 oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import check_algorithm, load_algorithm
from mrl.algorithms.describe import describe
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.kernels import Clip, ImportanceWeight, RatioKind
from mrl.kernels.oracle import policy_loss as oracle_loss
from mrl.types import LossOutput, Mean, MicroBatch

LENGTHS = [7, 4, 12]
FLOOR = 0.8


def drawn() -> tuple[Tensor, MicroBatch]:
    """Three sequences whose shifts are below and above that of the floor, -log 0.8 = 0.22."""
    rng = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    old = -torch.rand(num_tokens, generator=rng)
    logprobs = (old + 0.15 * torch.randn(num_tokens, generator=rng)).requires_grad_()
    return logprobs, MicroBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.long),
        position_ids=positions,
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        loss_mask=positions > 1,
        rollout_logprobs=old + 0.5 * torch.randn(num_tokens, generator=rng),
        rewards=torch.tensor([1.0, 0.0, 0.5]),
        advantages=torch.tensor([1.0, -2.0, 0.5]),
        seq_weight=torch.tensor([0.5, 0.25, 0.1]),
        old_logprobs=old,
        ref_logprobs=old - 0.1,
        router_shift=0.5 * torch.rand(num_tokens, generator=rng),
    )


def textbook(batch: MicroBatch, logprobs: Tensor, ratio: RatioKind, tis: bool) -> Tensor:
    """The loss in fp64, of w = exp(logp - old) max(exp(-shift), floor)."""
    assert batch.old_logprobs is not None
    assert batch.router_shift is not None
    assert batch.advantages is not None
    weight = torch.exp(-batch.router_shift.double()).clamp(min=FLOOR)
    return oracle_loss(
        logprobs + weight.log(), batch.old_logprobs, batch.loss_mask, batch.cu_seqlens,
        batch.advantages, batch.seq_weight, ratio=ratio, clip=Clip("ppo", low=0.2, high=0.2),
        rollout_logprobs=batch.rollout_logprobs if tis else None,
        importance=ImportanceWeight("tis", "token", 0.0, 2.0) if tis else None,
    ).loss  # fmt: skip


@pytest.mark.parametrize("importance", ["none", "tis"])
@pytest.mark.parametrize(("name", "ratio"), [("grpo", "token"), ("gspo", "sequence")])
def test_the_ratio_is_weighted_before_it_is_clipped(name: str, ratio: Any, importance: Any) -> None:
    logprobs, batch = drawn()
    plain = AlgorithmConfig(name=name, importance=importance, clip_low=0.2, clip_high=0.2)
    config = plain.model_copy(update={"router_shift_floor": FLOOR})
    output = load_algorithm(name).loss(logprobs, batch, config)
    (found,) = torch.autograd.grad(output.loss_sum, logprobs)
    exact = logprobs.detach().double().requires_grad_()
    expected = textbook(batch, exact, ratio, tis=importance == "tis")
    (wanted,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(
        output.loss_sum.double().detach(), expected.detach(), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-8)
    without = load_algorithm(name).loss(logprobs, batch, plain)
    assert not torch.allclose(without.loss_sum, output.loss_sum, rtol=1e-3)


def value(output: LossOutput, name: str) -> float:
    mean = output.stats[name]
    assert isinstance(mean, Mean)
    return float(mean.total / mean.count)


def test_what_it_reports_and_leaves_alone() -> None:
    logprobs, batch = drawn()
    assert batch.router_shift is not None
    config = AlgorithmConfig(router_shift_floor=FLOOR, importance="tis", kl_coef=0.1)
    plain = config.model_copy(update={"router_shift_floor": None})
    weighted, without = (load_algorithm("grpo").loss(logprobs, batch, c) for c in (config, plain))
    weights = batch.router_shift[batch.loss_mask].neg().exp().clamp(min=FLOOR)
    assert value(weighted, "router_shift/mean") == pytest.approx(float(weights.mean()), rel=1e-6)
    at_floor = float((weights == FLOOR).float().mean())
    assert 0 < at_floor < 1
    assert value(weighted, "router_shift/floor_share") == pytest.approx(at_floor)
    for key in ("importance/mean", "kl/ref"):
        assert value(weighted, key) == pytest.approx(value(without, key), rel=1e-5)
    assert not any(key.startswith("router_shift") for key in without.stats)
    still = dataclasses.replace(batch, router_shift=torch.zeros(sum(LENGTHS)))
    assert torch.equal(
        load_algorithm("grpo").loss(logprobs, still, config).loss_sum, without.loss_sum
    )
    with pytest.raises(ValueError, match="router_shift: got None"):
        load_algorithm("grpo").loss(logprobs, dataclasses.replace(batch, router_shift=None), config)


def test_it_is_refused_where_nothing_reads_it() -> None:
    check_algorithm(AlgorithmConfig(name="gspo", router_shift_floor=0.8))
    with pytest.raises(InputError, match=r"router_shift_floor is 0\.8, but cispo does not read it"):
        check_algorithm(AlgorithmConfig(name="cispo", router_shift_floor=0.8))
    assert "RSPO" in describe(AlgorithmConfig(name="grpo", router_shift_floor=0.8))
