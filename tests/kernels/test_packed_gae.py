"""`mrl::packed_gae` against its fp64 oracle: values, masks, bits, errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels.oracle.packed_gae import packed_gae as oracle_gae
from mrl.kernels.packed_gae import packed_gae
from tests.kernels.threads import kernel_threads

LENGTHS = [0, 1, 2, 7, 8, 9, 100, 127, 128, 129, 700]


@dataclass
class Case:
    rewards: Tensor
    values: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor

    def args(self) -> list[Tensor]:
        return list(vars(self).values())


def make_case(lengths: list[int], seed: int = 0, keep: float = 0.7) -> Case:
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    return Case(
        torch.randn(n, generator=rng),
        3 * torch.randn(n, generator=rng),
        torch.rand(n, generator=rng) < keep,
        torch.tensor([0, *lengths]).cumsum(0).int(),
    )


def select(case: Case, order: list[int]) -> Case:
    """The sequences of `order`, packed in that order."""
    bounds = case.cu_seqlens.tolist()
    tokens = [torch.arange(bounds[i], bounds[i + 1]) for i in order]
    sizes = [0, *map(len, tokens)]
    at = torch.cat(tokens)
    packed = (t[at] for t in (case.rewards, case.values, case.loss_mask))
    return Case(*packed, torch.tensor(sizes).cumsum(0).int())


def length_adaptive(case: Case) -> Tensor:
    """f32[B]: 1 - 1 / (0.05 length), clamped: VAPO's (arXiv 2504.05118) with alpha 0.05."""
    return (1 - 20 / case.cu_seqlens.diff().clamp(min=1)).clamp(0, 1).float()


def assert_same_bits(first, second) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(
    lengths=st.lists(st.sampled_from(LENGTHS), max_size=9),
    seed=st.integers(0, 2**31),
    keep=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0, "per sequence"]),
)
@settings(max_examples=60, deadline=None)
def test_values_match_oracle(lengths, seed, keep, gamma, lam) -> None:
    case = make_case(lengths, seed, keep)
    if lam == "per sequence":
        lam = length_adaptive(case)
    got = packed_gae(*case.args(), gamma=gamma, lam=lam)
    expected = oracle_gae(*case.args(), gamma=gamma, lam=lam)
    for g, e in zip(got, expected, strict=True):
        # One rounding to fp32; the absolute part is fp64's, where large numbers cancel.
        torch.testing.assert_close(g.double(), e, rtol=2**-23, atol=1e-11)
        assert bool((g[~case.loss_mask] == 0).all())


def test_three_steps_by_hand() -> None:
    """gamma = lam = 1/2, a masked token in the middle: the steps are tokens 0, 2 and 3."""
    case = Case(
        torch.tensor([1.0, 100.0, 2.0, 4.0]),
        torch.tensor([8.0, 100.0, 2.0, 1.0]),
        torch.tensor([1, 0, 1, 1], dtype=torch.uint8),
        torch.tensor([0, 4], dtype=torch.int32),
    )
    advantages, returns = packed_gae(*case.args(), gamma=0.5, lam=0.5)
    # A_3 = 4 - 1 = 3; A_2 = 2 + 1/2 - 2 + 3/4 = 1.25; A_0 = 1 + 2/2 - 8 + 1.25/4 = -5.6875
    assert advantages.tolist() == [-5.6875, 0.0, 1.25, 3.0]
    assert returns.tolist() == [2.3125, 0.0, 3.25, 4.0]


def test_lam_one_gives_monte_carlo_returns_and_lam_zero_one_step_errors() -> None:
    case = make_case([50], keep=1.0)
    _, returns = packed_gae(*case.args(), gamma=1.0, lam=1.0)
    ahead = case.rewards.double().flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(returns.double(), ahead, rtol=1e-6, atol=1e-6)
    advantages, _ = packed_gae(*case.args(), gamma=1.0, lam=0.0)
    coming = torch.cat([case.values[1:], torch.zeros(1)])
    torch.testing.assert_close(advantages, case.rewards + coming - case.values)


def test_a_lam_tensor_of_equal_numbers_is_that_number() -> None:
    case = make_case([9, 0, 300])
    one = packed_gae(*case.args(), gamma=0.99, lam=0.5)
    assert_same_bits(packed_gae(*case.args(), gamma=0.99, lam=torch.full((3,), 0.5)), one)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_masked_tokens_change_no_bit(garbage) -> None:
    case = make_case([0, 1, 40, 1500, 7], seed=3)
    clean = packed_gae(*case.args(), gamma=0.99, lam=0.95)
    masked = ~case.loss_mask
    dirty = replace(
        case,
        rewards=case.rewards.masked_fill(masked, garbage),
        values=case.values.masked_fill(masked, -garbage),
    )
    assert_same_bits(packed_gae(*dirty.args(), gamma=0.99, lam=0.95), clean)
    assert bool((clean[0][case.loss_mask] != 0).any())


def test_masked_tokens_are_passed_over_not_steps() -> None:
    """A sequence has the same advantages without its masked tokens."""
    case = make_case([400], seed=4)
    dense = Case(
        case.rewards[case.loss_mask],
        case.values[case.loss_mask],
        torch.ones(int(case.loss_mask.sum()), dtype=torch.bool),
        torch.tensor([0, int(case.loss_mask.sum())], dtype=torch.int32),
    )
    got = packed_gae(*case.args(), gamma=0.9, lam=0.8)
    expected = packed_gae(*dense.args(), gamma=0.9, lam=0.8)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g[case.loss_mask], e, rtol=2**-23, atol=1e-11)


def test_nan_at_a_loss_token_stays_in_its_sequence() -> None:
    case = make_case([40, 40, 40], keep=1.0)
    case.values[60] = torch.nan
    advantages, returns = packed_gae(*case.args(), gamma=0.99, lam=0.95)
    for out in (advantages, returns):
        assert out[40:61].isnan().all()
        assert out[:40].isfinite().all()
        assert out[61:].isfinite().all()


def test_same_bits_for_any_threads_packing_and_split() -> None:
    lengths = [(i * 577) % 3000 for i in range(40)]
    case = make_case(lengths, seed=5)
    lam = length_adaptive(case)
    with kernel_threads(1):
        one = packed_gae(*case.args(), gamma=0.99, lam=lam)
    with kernel_threads(2):
        assert_same_bits(packed_gae(*case.args(), gamma=0.99, lam=lam), one)

    pieces = [[0, 1, 2], [3], list(range(4, 40))]
    split = [packed_gae(*select(case, p).args(), gamma=0.99, lam=lam[p]) for p in pieces]
    assert_same_bits([torch.cat(parts) for parts in zip(*split, strict=True)], one)

    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = packed_gae(*select(case, order).args(), gamma=0.99, lam=lam[order])
    bounds = case.cu_seqlens.tolist()
    for got, expected in zip(shuffled, one, strict=True):
        parts = [expected[bounds[i] : bounds[i + 1]] for i in order]
        assert torch.equal(got, torch.cat(parts))


def test_opcheck() -> None:
    case = make_case([3, 0, 20])
    for lam in (None, torch.rand(3)):
        torch.library.opcheck(torch.ops.mrl.packed_gae.default, (*case.args(), lam, 0.99, 0.95))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rewards", torch.zeros(2, 5), r"rewards: got shape \[2, 5\], expected \[N\]"),
        ("rewards", torch.zeros(10).double(), "rewards: got dtype torch.float64, expected"),
        ("rewards", torch.zeros(10, requires_grad=True), "rewards: .*requires grad"),
        ("values", torch.zeros(9), r"values: got shape \[9\], expected \[10\]"),
        ("values", torch.zeros(10, requires_grad=True), "values: .*requires grad"),
        ("loss_mask", torch.ones(10), "loss_mask: got dtype torch.float32, expected torch.bool or"),
        ("values", torch.ones(10, device="meta"), "values: got device meta, expected cpu"),
        ("cu_seqlens", torch.tensor(3).int(), r"cu_seqlens: got shape \[\], expected \[B\+1\]"),
        ("cu_seqlens", torch.tensor([0, 4, 10]), "cu_seqlens: got dtype torch.int64, expected"),
        ("cu_seqlens", torch.tensor([0, 11, 10]).int(), "cu_seqlens: got 10 after 11 at index 2"),
        ("cu_seqlens", torch.tensor([0, 4, 9]).int(), r"cu_seqlens\[-1\] = 9, expected .* 10"),
        ("cu_seqlens", torch.tensor([1, 4, 10]).int(), r"cu_seqlens\[0\] = 1, expected 0"),
        ("cu_seqlens", torch.tensor([0]).int(), "cu_seqlens: got no sequence for 10 tokens"),
    ],
)
def test_bad_input_is_named(field, value, message) -> None:
    case = replace(make_case([4, 6]), **{field: value})
    with pytest.raises(ValueError, match=message):
        packed_gae(*case.args(), gamma=1.0, lam=0.95)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, r"gamma: got 1\.5, expected between 0 and 1"),
        ({"gamma": float("nan")}, "gamma: got nan"),
        ({"lam": -0.1}, r"lam: got -0\.1, expected between 0 and 1"),
        ({"lam": torch.ones(3)}, r"lam: got shape \[3\], expected \[2\]"),
        ({"lam": torch.ones(2).double()}, "lam: got dtype torch.float64"),
        ({"lam": torch.ones(2, requires_grad=True)}, "lam: .*requires grad"),
        ({"lam": torch.tensor([1.0, 1.5])}, r"lam: got 1\.5.* for sequence 1, expected between"),
        ({"lam": torch.tensor([torch.nan, 1.0])}, "lam: got nan for sequence 0, expected between"),
    ],
)
def test_bad_settings_are_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        packed_gae(*make_case([4, 6]).args(), **{"gamma": 1.0, "lam": 0.95, **settings})


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_cuda_kernel_matches_the_oracle_in_any_packing(emulated_cuda, order) -> None:
    case = make_case([0, 1, 5, 255, 1024, 1025, 2500], seed=7)
    masked = ~case.loss_mask
    case.rewards[masked] = torch.nan
    case.values[masked] = torch.inf
    lam = length_adaptive(case)
    chosen = [6, 2, 5]
    part = select(case, chosen)
    with emulated_cuda(order):
        got = packed_gae(*case.args(), gamma=0.99, lam=lam)
        one_lam = packed_gae(*part.args(), gamma=0.99, lam=0.95)
        few = packed_gae(*part.args(), gamma=0.99, lam=lam[chosen])
    for g, e in zip(got, oracle_gae(*case.args(), gamma=0.99, lam=lam), strict=True):
        torch.testing.assert_close(g.double(), e, rtol=2**-23, atol=1e-11)
    for g, e in zip(one_lam, oracle_gae(*part.args(), gamma=0.99, lam=0.95), strict=True):
        torch.testing.assert_close(g.double(), e, rtol=2**-23, atol=1e-11)
    bounds = case.cu_seqlens.tolist()
    for f, g in zip(few, got, strict=True):
        assert torch.equal(f, torch.cat([g[bounds[i] : bounds[i + 1]] for i in chosen]))


@pytest.mark.parametrize(
    "change",
    [
        {"cu_seqlens": torch.tensor([0, 11, 10]).int()},
        {"cu_seqlens": torch.tensor([0, 4, 1 << 30]).int()},
        {"cu_seqlens": torch.tensor([-5, 4, 10]).int()},
        {"cu_seqlens": torch.tensor([0, 4, 9]).int()},
        {"lam": torch.tensor([1.0, torch.nan])},
    ],
)
def test_cuda_kernel_traps_instead_of_reading_elsewhere(emulated_cuda, change) -> None:
    given = {**vars(make_case([4, 6])), "gamma": 1.0, "lam": 0.5, **change}
    with emulated_cuda(), pytest.raises(ValueError, match=r"cu_seqlens|lam"):
        packed_gae(**given)
