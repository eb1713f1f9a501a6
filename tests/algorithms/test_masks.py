"""Rejection masks by hand: what each takes out, what stays, and what it reports.

That every combination of them with weights and clips is right is in test_invariance.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from mrl.algorithms import load_algorithm
from mrl.config import AlgorithmConfig, MaskConfig
from mrl.types import MicroBatch

LENGTHS = [4, 4]


def make_batch(
    *, logp=None, old=None, rollout=None, advantages=(1.0, -1.0)
) -> tuple[Tensor, MicroBatch]:
    """Two sequences of a prompt token and three loss tokens; log-probs of 0.5 where not given."""
    flat = torch.full((8,), math.log(0.5))
    given = [flat if t is None else torch.as_tensor(t).float() for t in (logp, old, rollout)]
    ids = torch.zeros(8, dtype=torch.long)
    batch = MicroBatch(
        input_ids=ids,
        position_ids=ids,
        cu_seqlens=torch.tensor([0, 4, 8]).int(),
        loss_mask=torch.tensor([False, True, True, True] * 2),
        rollout_logprobs=given[2],
        rewards=torch.tensor(advantages),
        advantages=torch.tensor(advantages),
        seq_weight=torch.full((2,), 1 / 6),
        old_logprobs=given[1],
    )
    return given[0].clone().requires_grad_(), batch


def trained(mask: MaskConfig, **how) -> tuple[list[int], float]:
    """The tokens that have a gradient under GRPO, and the share that the mask reports."""
    logprobs, batch = make_batch(**how)
    output = load_algorithm("grpo").loss(logprobs, batch, AlgorithmConfig(masks=(mask,)))
    (grad,) = torch.autograd.grad(output.loss_sum, logprobs)
    share = output.stats[f"mask/{mask.name}"]
    return grad.nonzero().flatten().tolist(), float(share.total / share.count)


def shifted(*gaps: float) -> list[float]:
    return [math.log(0.5) - gap for gap in gaps]


def test_token_mask_takes_out_tokens_by_old_over_rollout() -> None:
    rollout = shifted(9, 0, math.log(4.9), math.log(5.1), 0, math.log(0.51), math.log(0.49), 0)
    assert trained(MaskConfig(name="token_mask"), rollout=rollout) == ([1, 2, 5, 7], 2 / 6)


def test_sequence_mask_takes_out_sequences_by_their_mean() -> None:
    """The second's tokens are far off one by one, but not on average."""
    rollout = shifted(0, 0.004, 0.003, 0.002, 9, 1.0, -0.5, -0.5)
    assert trained(MaskConfig(name="sequence_mask"), rollout=rollout) == ([5, 6, 7], 3 / 6)


@pytest.mark.parametrize("advantages", [(1.0, -1.0), (-1.0, -1.0), (1.0, 1.0)])
def test_opsm_takes_out_negative_sequences_that_the_policy_has_left(advantages) -> None:
    rollout = shifted(0, -0.2, -0.1, 0.0, 0, -0.3, 0.0, 0.0)  # mean rollout - logp is 0.1 in both
    expected = [t for i, a in enumerate(advantages) if a > 0 for t in range(4 * i + 1, 4 * i + 4)]
    mask = MaskConfig(name="opsm", high=0.09)
    assert trained(mask, rollout=rollout, advantages=advantages)[0] == expected
    assert trained(MaskConfig(name="opsm", high=0.11), rollout=rollout)[1] == 0.0


def test_dppo_stops_a_move_that_goes_on_in_its_own_direction_only() -> None:
    """Probability 0.5 now; 0.3 and 0.7 at the rollout: up where A > 0, down where A < 0 is enough."""
    low, high = math.log(0.3), math.log(0.7)
    rollout = [0.0, low, high, math.log(0.4), 0.0, low, high, math.log(0.6)]
    mask = MaskConfig(name="dppo", low=0.15, high=0.15)
    assert trained(mask, rollout=rollout) == ([2, 3, 5, 7], 2 / 6)
    # A rare token may grow tenfold: what counts is the probability that moved.
    rare = [math.log(p) for p in [1, 0.01, 0.01, 0.01] * 2]
    assert trained(mask, logp=rare, old=rare, rollout=[r - math.log(10) for r in rare])[1] == 0.0


def test_masks_compose_with_weights_and_leave_the_denominator() -> None:
    """Two masks, TIS, and an infinite weight on a masked token: the others train as they did."""
    rollout = shifted(0, 0.1, 200.0, -0.1, 0, 0.0, 0.1, 0.2)
    masks = (MaskConfig(name="token_mask"), MaskConfig(name="opsm", high=5.0))
    weighted = AlgorithmConfig(importance="tis")
    grads = []
    for config in (weighted, weighted.model_copy(update={"masks": masks})):
        logprobs, batch = make_batch(rollout=rollout)
        output = load_algorithm("grpo").loss(logprobs, batch, config)
        grads.append(torch.autograd.grad(output.loss_sum, logprobs)[0])
        assert bool(output.loss_sum.isfinite())
    assert grads[1][2] == 0
    keep = torch.arange(8) != 2
    assert torch.equal(grads[0][keep], grads[1][keep])


@pytest.mark.parametrize("importance", ["tis", "mis"])
def test_an_infinite_ratio_under_a_mask_is_no_nan(importance) -> None:
    logp, rollout = shifted(0, -200.0, 0, 0, 0, 0, 0, 0), shifted(0, 200.0, 0, 0, 0, 0, 0, 0)
    logprobs, batch = make_batch(logp=logp, rollout=rollout, advantages=(-1.0, 1.0))
    masks = (MaskConfig(name="token_mask"),)
    config = AlgorithmConfig(importance=importance, importance_high=1e30, masks=masks)
    loss = load_algorithm("grpo").loss(logprobs, batch, config).loss_sum
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert bool(loss.isfinite())
    assert bool(grad.isfinite().all())
    assert grad[1] == 0
    bare = config.model_copy(update={"masks": ()})
    if importance == "tis":  # and without the mask it is not hidden
        assert not bool(load_algorithm("grpo").loss(logprobs, batch, bare).loss_sum.isfinite())


def test_what_an_engine_could_not_score_is_not_masked_silently() -> None:
    logprobs, batch = make_batch(rollout=[math.nan] * 8)
    masks = (MaskConfig(name="token_mask"), MaskConfig(name="sequence_mask"))
    config = AlgorithmConfig(importance="tis", masks=masks)
    assert load_algorithm("grpo").loss(logprobs, batch, config).loss_sum.isnan()


def test_a_sequence_without_loss_tokens_is_in_no_mask() -> None:
    logprobs, batch = make_batch()
    empty = torch.zeros_like(batch.loss_mask)
    masks = tuple(MaskConfig(name=n, high=2.0) for n in ("token_mask", "sequence_mask", "opsm"))
    output = load_algorithm("gspo").loss(
        logprobs, dataclasses.replace(batch, loss_mask=empty), AlgorithmConfig(masks=masks)
    )
    assert output.loss_sum.item() == 0.0
    assert all(float(output.stats[f"mask/{m.name}"].total) == 0 for m in masks)
