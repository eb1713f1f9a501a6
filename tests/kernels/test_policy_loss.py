"""`mrl::policy_loss` against its fp64 oracle: values, gradients, bits, masks, errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import oracle, policy_loss
from mrl.kernels.policy_loss import policy_loss_vectorized

RATIOS = ("token", "sequence")
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@dataclass
class Case:
    logprobs: Tensor
    old_logprobs: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    seq_weight: Tensor

    def args(self) -> list[Tensor]:
        return list(vars(self).values())


def make_case(lengths: list[int], seed: int = 0, scale: float = 0.5, keep: float = 0.7) -> Case:
    """Ragged sequences; each has a mean log-ratio of its own, so that both ratios clip at times."""
    rng = torch.Generator().manual_seed(seed)
    n, b = sum(lengths), len(lengths)
    sizes = torch.tensor(lengths, dtype=torch.long)
    logprobs = -torch.rand(n, generator=rng) * 3
    shift = torch.randn(b, generator=rng).repeat_interleave(sizes)
    return Case(
        logprobs,
        logprobs - scale * (shift + torch.randn(n, generator=rng)),
        torch.rand(n, generator=rng) < keep,
        torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(),
        torch.randn(b, generator=rng),
        torch.rand(b, generator=rng) + 0.1,
    )


def run_op(case: Case, ratio: str, clip: dict[str, float] = CLIP):
    """Loss, gradient f32[N] and the four statistics, all from the public function."""
    leaf = case.logprobs.clone().requires_grad_()
    result = policy_loss(leaf, *case.args()[1:], ratio=ratio, **clip)
    result.loss.backward()
    return result.loss.detach(), leaf.grad, torch.stack(result[1:])


def run_vectorized(case: Case, ratio: str, clip: dict[str, float] = CLIP):
    return policy_loss_vectorized(*case.args(), ratio, *clip.values())


def run_oracle(case: Case, ratio: str, clip: dict[str, float] = CLIP):
    leaf = case.logprobs.double().requires_grad_()
    result = oracle.policy_loss(leaf, *case.args()[1:], ratio=ratio, **clip)
    result.loss.backward()
    return result.loss.detach(), leaf.grad, torch.tensor(result[1:], dtype=torch.float64)


def near_a_bound(case: Case, ratio: str, clip: dict[str, float] = CLIP) -> bool:
    """Whether fp32 could see some ratio on the other side of a clip bound than fp64 does."""
    gaps = (case.logprobs.double() - case.old_logprobs.double())[case.loss_mask]
    if ratio == "sequence":
        parts = [
            (case.logprobs[s:e].double() - case.old_logprobs[s:e].double())[case.loss_mask[s:e]]
            for s, e in pairwise(case.cu_seqlens.tolist())
        ]
        gaps = torch.tensor([p.mean() for p in parts if p.numel()], dtype=torch.float64)
    bounds = (1 - clip["clip_low"], 1 + clip["clip_high"])
    return any(bool(((gaps.exp() - bound).abs() < 1e-5).any()) for bound in bounds)


def assert_same_bits(first, second) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b), (a, b)


@pytest.mark.parametrize("run", [run_op, run_vectorized])
@pytest.mark.parametrize("ratio", RATIOS)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 15, 16, 17, 100, 1023, 1025, 2100]), max_size=6),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.01, 0.5, 5.0]),
    keep=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_match_oracle(run, ratio, lengths, seed, scale, keep) -> None:
    case = make_case(lengths, seed, scale, keep)
    assume(not near_a_bound(case, ratio))
    for got, expected in zip(run(case, ratio), run_oracle(case, ratio), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", [run_op, run_vectorized])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("logratio", [-150.0, -90.0, -30.0, 30.0, 80.0])
@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
def test_extreme_ratios_match_oracle(run, ratio, logratio, advantage) -> None:
    case = make_case([5])
    case.old_logprobs = case.logprobs - logratio
    case.advantages = torch.tensor([advantage])
    for got, expected in zip(run(case, ratio), run_oracle(case, ratio), strict=True):
        # The inputs are fp32, so fp32's exp of -150 is 0 and fp64's is 1e-66.
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("run", [run_op, run_vectorized])
@pytest.mark.parametrize("ratio", RATIOS)
def test_overflowing_ratio_is_not_hidden(run, ratio) -> None:
    case = make_case([5], keep=1.0)
    case.old_logprobs = case.logprobs - 1000
    for advantage, finite in [(1.0, True), (0.0, True), (-1.0, False)]:
        case.advantages = torch.tensor([advantage])
        loss, grad, stats = run(case, ratio)
        assert bool(loss.isfinite()) == finite
        assert bool(grad.isfinite().all()) == finite
        assert stats[2] == torch.inf


@pytest.mark.parametrize("run", [run_op, run_vectorized])
@pytest.mark.parametrize("ratio", RATIOS)
def test_nan_at_a_loss_token_reaches_every_output(run, ratio) -> None:
    case = make_case([40, 40], keep=1.0)
    case.logprobs[3] = torch.nan
    loss, grad, stats = run(case, ratio)
    assert loss.isnan()
    assert grad[3].isnan()
    assert stats[0].isnan()
    assert stats[2].isnan()
    assert grad[40:].isfinite().all()


def test_exp_is_accurate_over_its_whole_range() -> None:
    x = torch.cat([torch.linspace(-87, 88.7, 100_001), torch.linspace(-1, 1, 10_001)])
    n = x.numel()
    case = Case(
        x,
        torch.zeros(n),
        torch.ones(n, dtype=torch.bool),
        torch.tensor([0, n], dtype=torch.int32),
        torch.tensor([-1.0]),
        torch.tensor([1.0]),
    )
    _, grad, _ = run_op(case, "token", {"clip_low": 1.0, "clip_high": 0.0})
    expected = x.double().exp()
    assert grad is not None
    assert float(((grad.double() - expected) / expected).abs().max()) < 1.5 * 2**-23


@pytest.mark.parametrize("run", [run_op, run_vectorized])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_masked_tokens_change_no_bit(run, ratio, garbage) -> None:
    case = make_case([0, 1, 40, 1500, 7], seed=3)
    clean = run(case, ratio)
    masked = ~case.loss_mask
    dirty = replace(
        case,
        logprobs=case.logprobs.masked_fill(masked, garbage),
        old_logprobs=case.old_logprobs.masked_fill(masked, -garbage),
    )
    assert_same_bits(run(dirty, ratio), clean)
    assert bool((clean[1][masked] == 0).all())
    assert bool((clean[1][case.loss_mask] != 0).any())


@pytest.mark.parametrize("ratio", RATIOS)
def test_same_bits_for_any_threads_packing_and_split(ratio) -> None:
    lengths = [(i * 577) % 3000 for i in range(40)]
    case = make_case(lengths, seed=5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run_op(case, ratio)
        torch.set_num_threads(2)
        assert_same_bits(run_op(case, ratio), one)
    finally:
        torch.set_num_threads(before)

    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    loss, grad, stats = run_op(select(case, order), ratio)
    assert_same_bits((loss, stats), (one[0], one[2]))
    bounds = case.cu_seqlens.tolist()
    assert torch.equal(grad, torch.cat([one[1][bounds[i] : bounds[i + 1]] for i in order]))

    parts = [run_op(select(case, ids), ratio) for ids in ([0, 1, 2], [3], list(range(4, 40)))]
    assert torch.equal(torch.cat([part[1] for part in parts]), one[1])
    torch.testing.assert_close(sum(part[0] for part in parts), one[0], rtol=1e-13, atol=0)


def select(case: Case, order: list[int]) -> Case:
    """The sequences of `order`, packed in that order."""
    bounds = case.cu_seqlens.tolist()
    tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    sizes = torch.tensor([bounds[i + 1] - bounds[i] for i in order])
    return Case(
        case.logprobs[tokens],
        case.old_logprobs[tokens],
        case.loss_mask[tokens],
        torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(),
        case.advantages[order],
        case.seq_weight[order],
    )


@pytest.mark.parametrize("ratio", RATIOS)
def test_oracle_matches_finite_differences(ratio) -> None:
    case = make_case([4, 0, 1, 6], seed=2)
    assert not near_a_bound(case, ratio)
    _, grad, stats = run_oracle(case, ratio)
    assert 0 < stats[3] < stats[1], "the case should clip some ratios and not others"
    step = 1e-6
    for t in range(case.logprobs.numel()):
        nudge = torch.zeros(case.logprobs.numel(), dtype=torch.float64)
        nudge[t] = step
        losses = [
            run_oracle(replace(case, logprobs=case.logprobs.double() + sign * nudge), ratio)[0]
            for sign in (1, -1)
        ]
        torch.testing.assert_close(
            (losses[0] - losses[1]) / (2 * step), grad[t], rtol=1e-5, atol=1e-8
        )


@pytest.mark.parametrize(
    ("advantage", "ratio_value", "clips"),
    [(1, 1.5, True), (1, 0.5, False), (-1, 1.5, False), (-1, 0.5, True)],
)
@pytest.mark.parametrize("ratio", RATIOS)
def test_clip_takes_the_pessimistic_branch(ratio, advantage, ratio_value, clips) -> None:
    case = make_case([4], keep=1.0)
    case.old_logprobs = case.logprobs - torch.tensor(ratio_value).log()
    case.advantages, case.seq_weight = torch.tensor([float(advantage)]), torch.tensor([1.0])
    loss, grad, stats = run_op(case, ratio)
    times = 4 if ratio == "token" else 1
    value = (1.3 if advantage > 0 else 0.8) if clips else ratio_value
    torch.testing.assert_close(float(loss), -advantage * value * times, rtol=1e-6, atol=0)
    assert bool((grad == 0).all()) == clips
    assert stats[3] == (times if clips else 0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_ratio_is_exactly_one_on_policy(ratio) -> None:
    case = make_case([0, 30, 2000], keep=1.0)
    case.old_logprobs = case.logprobs.clone()
    _, _, (total, count, largest, clips) = run_op(case, ratio)
    assert (total / count, largest, clips) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_opcheck(ratio) -> None:
    case = make_case([3, 0, 20])
    case.logprobs.requires_grad_()
    torch.library.opcheck(torch.ops.mrl.policy_loss.default, (*case.args(), ratio, 0.2, 0.3))


def test_upstream_gradient_scales() -> None:
    case = make_case([30, 40])
    _, grad, _ = run_op(case, "token")
    leaf = case.logprobs.clone().requires_grad_()
    (policy_loss(leaf, *case.args()[1:], ratio="token", **CLIP).loss * 0.25).backward()
    assert torch.equal(leaf.grad, grad * 0.25)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", torch.zeros(2, 5), r"logprobs: got shape \[2, 5\], expected \[N\]"),
        ("logprobs", torch.zeros(10).double(), r"logprobs: got dtype torch.float64, expected"),
        ("old_logprobs", torch.zeros(9), r"old_logprobs: got shape \[9\], expected \[10\]"),
        ("old_logprobs", torch.zeros(10, requires_grad=True), "old_logprobs: .*requires grad"),
        ("loss_mask", torch.ones(10), "loss_mask: got dtype torch.float32, expected torch.bool or"),
        ("advantages", torch.ones(3), r"advantages: got shape \[3\], expected \[2\]"),
        ("seq_weight", torch.ones(2, device="meta"), "seq_weight: got device meta, expected .*cpu"),
        ("cu_seqlens", torch.tensor([0, 4, 10]), "cu_seqlens: got dtype torch.int64, expected"),
        ("cu_seqlens", torch.tensor([0, 11, 10]).int(), "cu_seqlens: got 10 after 11 at index 2"),
        ("cu_seqlens", torch.tensor([0, 4, 9]).int(), r"cu_seqlens\[-1\] = 9, expected .* 10"),
        ("cu_seqlens", torch.tensor([1, 4, 10]).int(), r"cu_seqlens\[0\] = 1, expected 0"),
    ],
)
def test_bad_input_is_named(field, value, message) -> None:
    case = replace(make_case([4, 6]), **{field: value})
    with pytest.raises(ValueError, match=message):
        policy_loss(*case.args(), ratio="token", **CLIP)


def test_bad_settings_are_named() -> None:
    args = make_case([4]).args()
    with pytest.raises(ValueError, match=r"ratio: got 'tokens', expected 'token' or 'sequence'"):
        policy_loss(*args, ratio="tokens", **CLIP)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"clip_low: got 1\.5"):
        policy_loss(*args, ratio="token", clip_low=1.5, clip_high=0.2)
