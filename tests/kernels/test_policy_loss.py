"""`mrl::policy_loss` against its fp64 oracle: every combination of options, hard inputs, gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import POLICY_STATS, Clip, ImportanceWeight, KlPenalty, policy_loss
from tests.kernels.policy_cases import (
    AGGREGATIONS,
    ALL_OPTIONS,
    FEW_OPTIONS,
    RATIOS,
    TOKEN_BUDGET,
    Case,
    Options,
    assert_close,
    make_case,
    near_a_bound,
    run_op,
    run_oracle,
)
from tests.release import only_in_release, release


def usual_case(o: Options, **changes) -> Case:
    """Ragged, with an empty, a one-token and a fully masked sequence; no ratio at a bound."""
    lengths = [40, 0, 1, 100, 17, 33, 1030, 64]
    for seed in range(20):
        case = make_case(lengths, seed, **changes)
        case.loss_mask[41 : 41 + 100] = False
        if not near_a_bound(case, o):
            return case
    raise AssertionError("every case has a ratio at a bound")


# `make test` takes 43 combinations, with all pairs of two options.
@pytest.mark.parametrize(
    ("token_advantages", "step"),
    [(False, 7), (True, 7), release(False, 1), release(True, 1)],
    ids=str,
)
def test_every_combination_matches_the_oracle(token_advantages, step) -> None:
    apart = []
    for o in ALL_OPTIONS[::step]:
        case = usual_case(o, token_advantages=token_advantages)
        try:
            assert_close(run_op(case, o), run_oracle(case, o))
        except AssertionError as error:
            apart.append(f"{o}: {error}")
    assert not apart, f"{len(apart)} of {len(ALL_OPTIONS[::step])}: " + "\n".join(apart[:3])


def aggregated(case: Case, o: Options, aggregation: str) -> Tensor:
    """The loss by its textbook definition over per-token losses of the oracle, weight by weight."""
    ones = torch.ones(len(case.lengths))
    per_token = []  # the oracle's loss of one sequence with weight 1 is the sum of its token losses
    for i, (start, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
        only = replace(case, seq_weight=torch.zeros_like(ones).index_fill(0, torch.tensor(i), 1.0))
        count = int(case.loss_mask[start:end].sum())
        scale = count if o.ratio == "sequence" else 1  # back to a sum over tokens
        per_token.append((run_oracle(only, o).loss * scale, count))
    num_tokens = sum(count for _, count in per_token)
    num_samples = sum(count > 0 for _, count in per_token)
    if aggregation == "token-mean":
        return torch.stack([total for total, _ in per_token]).sum() / num_tokens
    if aggregation == "seq-mean-token-mean":
        means = [total / count for total, count in per_token if count]
        return torch.stack(means).sum() / num_samples
    return torch.stack([total / TOKEN_BUDGET for total, _ in per_token]).sum() / num_samples


def weights_of(case: Case, o: Options, aggregation: str) -> Tensor:
    """What `seq_weight` must be for an aggregation: under ratio `sequence` the op divides by |y|."""
    counts = torch.tensor(
        [float(case.loss_mask[s:e].sum()) for s, e in pairwise(case.cu_seqlens.tolist())]
    )
    own = counts if o.ratio == "sequence" else torch.ones_like(counts)
    num_samples = (counts > 0).sum()
    if aggregation == "token-mean":
        weights = own / counts.sum()
    elif aggregation == "seq-mean-token-mean":
        weights = own / (counts.clamp(min=1) * num_samples)
    else:
        weights = own / (TOKEN_BUDGET * num_samples)
    return torch.where(counts > 0, weights, 0.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "o", only_in_release(FEW_OPTIONS, lambda o: o not in FEW_OPTIONS[::3]), ids=str
)
def test_aggregations_fold_into_seq_weight(o, aggregation) -> None:
    case = usual_case(o)
    folded = replace(case, seq_weight=weights_of(case, o, aggregation))
    torch.testing.assert_close(
        run_op(folded, o).loss, aggregated(case, o, aggregation), rtol=1e-5, atol=1e-6
    )
    assert_close(run_op(folded, o), run_oracle(folded, o))


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 15, 16, 17, 100, 1023, 1025, 2100]), max_size=6),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.01, 0.2, 3.0]),
    keep=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
    token_advantages=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_shape_matches_the_oracle(o, lengths, seed, scale, keep, token_advantages) -> None:
    case = make_case(lengths, seed, scale, keep, token_advantages)
    assume(not near_a_bound(case, o))
    expected = run_oracle(case, o)
    largest = float(expected.seq_stats.abs().max()) if lengths else 0.0
    assert_close(run_op(case, o), expected, atol=1e-6 * max(1.0, largest))


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
def test_a_long_sequence_matches_the_oracle(o) -> None:
    """100,000 tokens, where fp32 sums would be off by far more; per-token fp32 sets the bound."""
    if o.ratio == "token":  # a token of so many is always near a bound
        o = replace(o, clip=Clip("none"), importance=None)
    case = make_case([3, 100_000, 50], seed=1)
    assert_close(run_op(case, o), run_oracle(case, o), rtol=2e-5)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("clip", [Clip("ppo"), Clip("ppo", dual=3.0), Clip("cispo"), Clip("sapo")])
@pytest.mark.parametrize("logratio", [-150.0, -90.0, -30.0, 30.0, 80.0])
@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
def test_extreme_ratios_match_the_oracle(ratio, clip, logratio, advantage) -> None:
    o = Options(ratio, clip)
    case = make_case([5], keep=1.0)
    case = replace(
        case,
        old_logprobs=case.logprobs - logratio,
        advantages=torch.tensor([advantage]),
        rollout_logprobs=case.logprobs - logratio,
    )
    # The inputs are fp32, so fp32's exp of -150 is 0 and fp64's is 1e-66.
    assert_close(run_op(case, o), run_oracle(case, o), rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [-60.0, -3e-4, 1e-6, 3e-4, 0.1, 30.0])
def test_kl_is_accurate_for_small_and_large_gaps(kind, gap) -> None:
    """exp(d) - 1 - d in fp32 would lose every digit of a gap of 3e-4."""
    o = Options("token", Clip("none"), None, KlPenalty(kind, 1.0))
    case = make_case([50], keep=1.0)
    case = replace(case, ref_logprobs=case.logprobs + gap, advantages=torch.zeros(1))
    assert_close(run_op(case, o), run_oracle(case, o), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("ratio", RATIOS)
def test_overflowing_ratio_is_not_hidden(ratio) -> None:
    case = make_case([5], keep=1.0)
    case = replace(case, old_logprobs=case.logprobs - 1000)
    for advantage, finite in [(1.0, True), (0.0, True), (-1.0, False)]:
        result = run_op(replace(case, advantages=torch.tensor([advantage])), Options(ratio))
        assert bool(result.loss.isfinite()) == finite
        assert bool(result.grad.isfinite().all()) == finite
        assert result.stats[POLICY_STATS.index("ratio_max")] == math.inf


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
def test_nan_at_a_loss_token_reaches_the_loss(o) -> None:
    case = make_case([40, 40], seed=4, keep=1.0)
    case.advantages.fill_(1.0)
    case.logprobs[3] = torch.nan
    result = run_op(case, o)
    assert result.loss.isnan()
    assert result.grad[3].isnan()
    assert result.stats[POLICY_STATS.index("ratio_max")].isnan()
    assert result.grad[40:].isfinite().all()
    assert result.seq_stats[1].isfinite().all()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("token_advantages", [False, True])
def test_nan_advantage_reaches_the_loss(ratio, token_advantages) -> None:
    case = make_case([40, 40], seed=4, keep=1.0, token_advantages=token_advantages)
    case.advantages.fill_(1.0)
    case.advantages[0] = torch.nan
    result = run_op(case, Options(ratio))
    assert result.loss.isnan()
    assert result.grad[0].isnan()
    assert result.grad[40:].isfinite().all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_nothing_times_infinity_is_nothing(ratio) -> None:
    """An infinite weight under an advantage or a sequence weight of 0; logp = -inf that MIS masks."""
    case = make_case([6], keep=1.0)
    endless = replace(case, rollout_logprobs=case.old_logprobs - 199)
    o = Options(ratio, Clip("ppo"), ImportanceWeight("tis", "token", 0.0, math.inf))
    for zero in ("advantages", "seq_weight"):
        result = run_op(replace(endless, **{zero: torch.zeros(1)}), o)
        assert float(result.loss) == 0
        assert bool((result.grad == 0).all())
    masked = replace(case, rollout_logprobs=case.old_logprobs + 3)
    masked.logprobs[2] = -torch.inf
    o = Options(ratio, Clip("cispo"), ImportanceWeight("mis", "token", 0.5, 5.0))
    assert float(run_op(masked, o).loss) == 0


@pytest.mark.parametrize("o", FEW_OPTIONS, ids=str)
def test_gradient_matches_finite_differences(o) -> None:
    """The differences are the fp64 oracle's, with the factors that the papers detach held fixed."""
    case = make_case([4, 0, 1, 6], seed=2, keep=0.8)
    grad = run_op(case, o).grad
    base, step = case.logprobs.double(), 1e-6
    for t in range(len(base)):
        nudge = torch.zeros_like(base)
        nudge[t] = step
        up, down = (
            run_oracle(replace(case, logprobs=base + sign * nudge), o, frozen=base).loss
            for sign in (1, -1)
        )
        slope = (up - down) / (2 * step)
        torch.testing.assert_close(grad[t].double(), slope, rtol=2e-5, atol=1e-6)


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    """Straight-through without token weights is GSPO eq. 5 itself, differentiated whole."""
    case = make_case([30, 7, 50], seed=3)
    leaf = case.logprobs.double().requires_grad_()
    loss = leaf.sum() * 0
    for i, (start, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
        mask = case.loss_mask[start:end]
        s = (leaf[start:end] - case.old_logprobs[start:end])[mask].mean().exp()
        advantage = case.advantages[i].double()
        best = torch.minimum(s * advantage, s.clamp(0.8, 1.3) * advantage)
        loss = loss - case.seq_weight[i].double() * best
    loss.backward()
    result = run_op(case, Options("sequence", Clip("ppo", 0.2, 0.3)))
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(result.grad.double(), leaf.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("advantage", "ratio_value", "clips"),
    [(1, 1.5, "high"), (1, 0.5, ""), (-1, 1.5, ""), (-1, 0.5, "low"), (0, 1.5, ""), (0, 0.5, "")],
)
@pytest.mark.parametrize("ratio", RATIOS)
def test_clip_takes_the_pessimistic_branch(ratio, advantage, ratio_value, clips) -> None:
    case = make_case([4], keep=1.0)
    case = replace(
        case,
        old_logprobs=case.logprobs - torch.tensor(ratio_value).log(),
        advantages=torch.tensor([float(advantage)]),
        seq_weight=torch.tensor([1.0]),
    )
    result = run_op(case, Options(ratio, Clip("ppo", 0.2, 0.3)))
    times = 4 if ratio == "token" else 1
    value = {"high": 1.3, "low": 0.8, "": ratio_value}[clips]
    torch.testing.assert_close(float(result.loss), -advantage * value * times, rtol=1e-6, atol=0)
    assert bool((result.grad == 0).all()) == (bool(clips) or advantage == 0)
    stats = dict(zip(POLICY_STATS, result.stats.tolist(), strict=True))
    assert stats["clip_high_count"] == (times if clips == "high" else 0)
    assert stats["clip_low_count"] == (times if clips == "low" else 0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_on_policy_everything_is_exactly_one_or_zero(ratio) -> None:
    case = make_case([0, 30, 2000], keep=1.0)
    case = replace(case, old_logprobs=case.logprobs, rollout_logprobs=case.logprobs)
    result = run_op(
        case, Options(ratio, importance=ImportanceWeight("mis", "token", low=1.0, high=1.0))
    )
    stats = dict(zip(POLICY_STATS, result.stats.tolist(), strict=True))
    assert stats["ratio_sum"] / stats["ratio_count"] == stats["ratio_max"] == 1.0
    assert stats["weight_sum"] == stats["weight_count"] == stats["weight_sq_sum"] == 2030
    zero = ("k1_sum", "k3_sum", "clip_high_count", "clip_low_count", "truncated_count")
    assert [stats[name] for name in (*zero, "mismatch_abs_sum", "mismatch_abs_max")] == [0.0] * 7


def test_upstream_gradient_scales() -> None:
    case, o = make_case([30, 40]), FEW_OPTIONS[0]
    leaf = case.logprobs.clone().requires_grad_()
    (policy_loss(**case.arguments(o) | {"logprobs": leaf}).loss * 0.25).backward()
    assert torch.equal(leaf.grad, run_op(case, o).grad * 0.25)


def test_backward_twice_gives_the_same_gradient() -> None:
    case, o = make_case([30, 40]), FEW_OPTIONS[0]
    leaf = case.logprobs.clone().requires_grad_()
    loss = policy_loss(**case.arguments(o) | {"logprobs": leaf}).loss
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    (loss * 3).backward()
    torch.testing.assert_close(leaf.grad, once * 4, rtol=1e-6, atol=0)
