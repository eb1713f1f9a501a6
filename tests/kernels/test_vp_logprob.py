"""`vp_logprob` against its fp64 oracle: values, gradients, bits over ranks, masks, errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import oracle, vp_logprob
from mrl.kernels.vp_logprob import tile_size
from tests.kernels.threads import kernel_threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the gradient, relative to its largest: what the logits' own type can hold.
GRAD_TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def make_logits(rows: int, columns: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0):
    rng = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, columns, generator=rng)).to(dtype)
    return logits, torch.randint(columns, (rows,), generator=rng)


def upstream(rows: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(9)
    return torch.randn(rows, generator=rng), 0.1 * torch.randn(rows, generator=rng)


def run(logits, labels, mask=None, function=vp_logprob, **options):
    """logprobs, entropy and the gradient of g . logprobs + g_H . entropy."""
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = function(leaf, labels, mask, **options)
    g, g_entropy = (x.to(logprobs.dtype) for x in upstream(len(labels)))
    # `* 1` makes the leaf's gradient a copy, also where the backward writes over its input.
    (grad,) = torch.autograd.grad((g * logprobs + g_entropy * entropy).sum(), leaf)
    return logprobs.detach(), entropy.detach(), grad


def expected(logits, labels, mask=None, **options):
    return run(logits.double(), labels, mask, function=oracle.vp_logprob, **options)


def assert_matches(got, wanted, dtype, largest: float = 0.0) -> None:
    """`largest`: of |logit / temperature|, whose rounding in fp32 is an error of its own."""
    atol = 2e-6 + 2e-7 * largest
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-6, atol=atol)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-6, atol=atol)
    scale = float(wanted[2].abs().max()) if wanted[2].numel() else 0.0
    # Where p is near 1, the label's gradient is what is left of g / temperature.
    tolerance = GRAD_TOLERANCE[dtype] * scale + 20 * atol
    torch.testing.assert_close(got[2].double(), wanted[2], rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from([1, 2, 7, 31, 32, 33, 64, 100, 1024, 1504, 4748, 5000]),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    masked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_matches_the_oracle(dtype, rows, columns, seed, scale, temperature, masked) -> None:
    logits, labels = make_logits(rows, columns, dtype, seed, scale)
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.6 if masked else None
    got = run(logits, labels, mask, temperature=temperature)
    largest = float(logits.abs().max()) / temperature if rows else 0.0
    assert_matches(got, expected(logits, labels, mask, temperature=temperature), dtype, largest)
    assert bool((got[0] <= 0).all())
    assert bool((got[1] >= 0).all())
    assert bool((got[1] <= math.log(columns) + 1e-6).all())


def assert_exact_at_any_level(num_rows: int = 400) -> None:
    """The error of log-probs is that of one rounding of x - max, however large the logits are."""
    for level, temperature in ((0.0, 0.7), (30.0, 1.0), (30.0, 0.7), (1000.0, 0.7), (-1000.0, 1.3)):
        logits, labels = make_logits(num_rows, 128, torch.float32, seed=5, scale=1.0)
        logits = logits + level
        got = vp_logprob(logits, labels, temperature=temperature)
        wanted = oracle.vp_logprob(logits, labels, temperature=temperature)
        for mine, exact in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.double(), exact, rtol=1e-7, atol=3e-7)


def test_the_level_of_the_logits_costs_no_accuracy() -> None:
    assert_exact_at_any_level()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_real_vocabulary(dtype) -> None:
    logits, labels = make_logits(6, 151_936, dtype)
    assert_matches(run(logits, labels), expected(logits, labels), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["peak late", "one far above", "padding", "first tile padded", "flat", "all but one"]
)
def test_extreme_rows(dtype, name) -> None:
    """The exponentials of a tile are taken relative to its first columns: not always a good choice."""
    logits, labels = make_logits(4, 4096, dtype)
    if name == "peak late":
        logits[:, 127::128] += 60
    elif name == "one far above":
        logits[:, 4000] = 500.0
        labels[:2] = 4000
    elif name == "padding":
        logits[:, 3000:] = -torch.inf
        labels.clamp_(max=2999)
    elif name == "first tile padded":
        logits[:, :200] = -torch.inf
        labels.clamp_(min=200)
    elif name == "flat":
        logits[:] = 7.0
    else:
        logits[:, 1:] = -torch.inf
        labels[:] = 0
    got, wanted = run(logits, labels), expected(logits, labels)
    wanted = (*wanted[:2], wanted[2].nan_to_num(0.0))  # fp64 autograd makes NaN of 0 * -inf
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=2e-6)
    if name not in ("padding", "first tile padded", "all but one"):
        assert_matches(got, wanted, dtype)
    assert bool(got[2].isfinite().all())
    assert float(got[2][logits == -torch.inf].abs().sum()) < 1e-30


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_logits_reach_the_outputs(dtype, garbage) -> None:
    for column in (0, 50, 500, 4095):
        for sign in (1, -1) if math.isnan(garbage) else (1,):
            logits, labels = make_logits(2, 4096, dtype)
            logits[0, column] = sign * garbage
            labels[0] = 7
            logprobs, entropy, grad = run(logits, labels)
            assert logprobs[0].isnan() or logprobs[0] == -torch.inf
            assert entropy[0].isnan()
            assert grad[0].isnan().any()
            assert logprobs[1].isfinite()
            assert grad[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_are_never_read(dtype) -> None:
    logits, labels = make_logits(8, 500, dtype)
    mask = torch.tensor([True, False] * 4)
    clean = run(logits, labels, mask)
    dirty_logits, dirty_labels = logits.clone(), labels.clone()
    dirty_logits[~mask] = torch.nan
    dirty_labels[~mask] = -100
    for a, b in zip(run(dirty_logits, dirty_labels, mask), clean, strict=True):
        assert torch.equal(a, b)
    assert all(bool((x[~mask] == 0).all()) for x in clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_batch_and_order_change_no_bit(dtype) -> None:
    logits, labels = make_logits(64, 3000, dtype)
    with kernel_threads(1):
        whole = run(logits, labels)
    with kernel_threads(2):
        for a, b in zip(run(logits, labels), whole, strict=True):
            assert torch.equal(a, b)
    alone = vp_logprob(logits[5:6], labels[5:6])
    assert torch.equal(alone[0], whole[0][5:6])
    assert torch.equal(alone[1], whole[1][5:6])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    mixed = vp_logprob(logits[order], labels[order])
    assert torch.equal(mixed[0], whole[0][order])
    assert torch.equal(mixed[1], whole[1][order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 4096, 151_936])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_change_no_bit(dtype, columns, ranks) -> None:
    """The ops of each rank, with the all-gather done by hand; test_groups.py uses real processes."""
    logits, labels = make_logits(5, columns, dtype)
    whole = run(logits, labels)
    local = columns // ranks
    tile = tile_size(local, ranks)
    shards = logits.split(local, dim=1)
    ops = torch.ops.mrl
    tiles = torch.stack([
        ops.vp_logprob_stats(shard.contiguous(), labels, None, r * local, columns, tile, 1.0)
        for r, shard in enumerate(shards)
    ])  # fmt: skip
    g, g_entropy = upstream(5)
    grads = []
    for r, shard in enumerate(shards):
        combined = ops.vp_logprob_combine(
            shard.contiguous(), labels, None, tiles, r * local, tile, 1.0, False
        )
        assert torch.equal(combined[0], whole[0])
        assert torch.equal(combined[2], whole[1])
        arguments = (labels, None, combined[1], combined[2], g, g_entropy, r * local, 1.0)
        grads.append(ops.vp_logprob_bwd(shard.contiguous(), *arguments))
    assert torch.equal(torch.cat(grads, 1), whole[2])


@pytest.mark.parametrize(
    ("vocabulary", "num_tiles"),
    [(32_768, 32), (128_256, 32), (129_280, 32), (151_936, 16), (152_064, 32), (128, 16), (100, 4)],
)
def test_tiles_are_whole_vectors_where_the_vocabulary_allows(vocabulary, num_tiles) -> None:
    tile = vocabulary // num_tiles
    assert tile % 8 == 0 or vocabulary % 8
    for ranks in (1, 2, 4):
        assert tile_size(vocabulary // ranks, ranks) == tile
    # More ranks than tiles: shorter tiles, none of which straddles two ranks.
    assert 151_936 // 32 % tile_size(151_936 // 32, 32) == 0
    assert tile_size(33, 3) == 33


def test_a_vocabulary_that_tiles_do_not_divide_is_still_right() -> None:
    logits, labels = make_logits(5, 3 * 33, torch.float32)
    local = 33
    tile = tile_size(local, 3)
    assert local % tile == 0
    tiles = torch.stack([
        torch.ops.mrl.vp_logprob_stats(shard.contiguous(), labels, None, r * local, 99, tile, 1.0)
        for r, shard in enumerate(logits.split(local, dim=1))
    ])  # fmt: skip
    got = torch.ops.mrl.vp_logprob_combine(
        logits[:, :local].contiguous(), labels, None, tiles, 0, tile, 1.0, False
    )
    wanted = oracle.vp_logprob(logits, labels)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[2].double(), wanted[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inplace_backward_gives_the_same_bits(dtype) -> None:
    logits, labels = make_logits(6, 1000, dtype)
    mask = torch.tensor([True, True, False, True, True, False])
    wanted = run(logits, labels, mask)[2]
    leaf = logits.clone().requires_grad_()
    buffer = leaf * 1  # what a model's last layer gives
    logprobs, entropy = vp_logprob(buffer, labels, mask, inplace_backward=True)
    g, g_entropy = upstream(6)
    (grad,) = torch.autograd.grad((g * logprobs + g_entropy * entropy).sum(), leaf)
    assert torch.equal(grad, wanted)
    assert torch.equal(buffer.detach(), wanted)


def test_inplace_backward_is_seen_by_whoever_needs_the_logits() -> None:
    logits, labels = make_logits(6, 100, torch.float32)
    leaf = logits.clone().requires_grad_()
    buffer = leaf * 1
    square = (buffer * buffer).sum()
    logprobs, _ = vp_logprob(buffer, labels, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (logprobs.sum() + square).backward()
    logprobs, _ = vp_logprob(leaf * 1, labels, inplace_backward=True)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
    with pytest.raises(ValueError, match="expected rows that do not overlap"):
        vp_logprob(logits[:1].expand(6, 100), labels, inplace_backward=True)


def test_no_second_gradient() -> None:
    logits, labels = make_logits(3, 100, torch.float32)
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(vp_logprob(leaf, labels)[0].sum(), leaf, create_graph=True)


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7FC001FF, 0x7FFFFFFF, -1, -0x3FFE01])
def test_any_nan_reaches_the_outputs(bits) -> None:
    logits, labels = make_logits(2, 4096, torch.float32)
    logits.view(torch.int32)[0, 500] = bits
    assert logits[0, 500].isnan()
    logprobs, entropy, grad = run(logits, labels)
    assert logprobs[0].isnan()
    assert entropy[0].isnan()
    assert grad[0].isnan().any()


def test_rows_without_gradient_are_zeros_and_not_read() -> None:
    logits, labels = make_logits(3, 100, torch.float32)
    leaf = logits.clone().requires_grad_()
    logprobs, _ = vp_logprob(leaf, labels)
    (grad,) = torch.autograd.grad(logprobs[1], leaf)
    assert bool((grad[[0, 2]] == 0).all())
    assert bool((grad[1] != 0).any())


def test_strided_rows() -> None:
    wide, labels = make_logits(5, 300, torch.bfloat16)
    labels %= 200
    view = wide[:, 50:250]
    for a, b in zip(run(view, labels), run(view.contiguous(), labels), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(vp_logprob(view, labels)[0], vp_logprob(view.contiguous(), labels)[0])


def test_conversions_are_those_of_torch() -> None:
    """Every half, and fp32 values around every rounding boundary."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = every.view(dtype)
        values = values[values.isfinite()].reshape(-1, 1)
        zeros = torch.zeros(len(values), dtype=torch.long)
        # One column: logp is 0 and lse the value itself.
        tiles = torch.ops.mrl.vp_logprob_stats(values, zeros, None, 0, 1, 1, 1.0)
        assert torch.equal(tiles[:, 0, 0], values[:, 0].float())
        assert torch.equal(tiles[:, 0, 3], values[:, 0].float())
    # d logit of a label with p = 1/2 is g / 2: a way to have any fp32 rounded.
    g = torch.linspace(-14, 3, 20_001).exp2() * torch.linspace(1, 2, 20_001)
    for dtype in (torch.float16,):
        logits = torch.zeros(len(g), 2, dtype=dtype)
        leaf = logits.requires_grad_()
        logprobs, _ = vp_logprob(leaf, torch.zeros(len(g), dtype=torch.long))
        (grad,) = torch.autograd.grad((g * logprobs).sum(), leaf)
        # Half a step: relative for normal halves, 2^-25 for subnormal ones.
        error = (grad[:, 0].float() - g / 2).abs()
        assert bool((error <= 2**-11 * (g / 2) + 2**-25).all())
        assert bool((grad.sum(1).abs() <= 2**-10 * g + 2**-24).all())
