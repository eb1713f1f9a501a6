"""rms_norm and rotate against their fp64 oracles, and the bits of a token alone and among others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import oracle, rms_norm, rotate
from tests.kernels.threads import kernel_threads

ERRORS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", list(ERRORS), ids=str)


def check(got: Tensor | None, exact: Tensor | None, dtype: torch.dtype) -> None:
    assert got is not None
    assert exact is not None
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=ERRORS[dtype], rtol=ERRORS[dtype])


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 16, 31, 32, 33, 64, 200])
def test_norm_matches_the_oracle(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (
        rows(*s, size, dtype=dtype, seed=i) for i, s in enumerate(((9,), (9,), ()))
    )
    for added in (None, residual):
        got, exact = (f(x, weight, 1e-6, added) for f in (rms_norm, oracle.rms_norm))
        check(got[0], exact[0], dtype)
        if added is None:
            assert got[1] is None
        else:
            check(got[1], exact[1], dtype)


@DTYPES
def test_heads_of_a_slice(dtype: torch.dtype) -> None:
    """Queries and keys are slices of one product, so that their tokens are far apart."""
    qkv, weight = rows(12, 80, dtype=dtype), rows(16, dtype=dtype)
    for part in qkv.split([48, 16, 16], dim=-1):
        x = part.unflatten(1, (-1, 16))
        got, _ = rms_norm(x, weight, 1e-5)
        assert got.is_contiguous()
        check(got, oracle.rms_norm(x, weight, 1e-5)[0], dtype)


def test_zeros_and_large_values() -> None:
    assert not rms_norm(torch.zeros(2, 40), torch.ones(40), 1e-6)[0].any()
    x = rows(3, 40) * 1e15
    check(
        rms_norm(x, torch.ones(40), 1e-6)[0], oracle.rms_norm(x, torch.ones(40), 1e-6)[0], x.dtype
    )


def angles(size: int, num_positions: int = 50) -> Tensor:
    angle = torch.arange(num_positions)[:, None] / 100 ** (torch.arange(size // 2) / size)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@DTYPES
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize(("size", "rotary"), [(16, 16), (16, 8), (6, 2), (64, 64), (10, 2)])
def test_rotation_matches_the_oracle(
    size: int, rotary: int, halves: bool, dtype: torch.dtype
) -> None:
    query, key, _ = rows(11, 5 * size, dtype=dtype).split([3 * size, size, size], dim=-1)
    positions = torch.randint(0, 50, (11,), generator=torch.Generator().manual_seed(1))
    given = (query, key, positions, angles(rotary), size)
    got, exact = (f(*given, halves=halves) for f in (rotate, oracle.rotate))
    for ours, theirs in zip(got, exact, strict=True):
        assert ours.is_contiguous()
        check(ours, theirs, dtype)
    assert torch.equal(got[0].unflatten(1, (-1, size))[..., rotary:].flatten(),
                       query.unflatten(1, (-1, size))[..., rotary:].flatten())  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 31), st.integers(0, 1000), st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_token_alone_has_the_bits_it_has_among_others(
    token: int, seed: int, size: int, dtype: torch.dtype
) -> None:
    x, residual = (rows(32, size, dtype=dtype, seed=seed + i) for i in range(2))
    weight, one = rows(size, dtype=dtype, seed=seed), slice(token, token + 1)
    whole = rms_norm(x, weight, 1e-6, residual)
    alone = rms_norm(x[one], weight, 1e-6, residual[one])
    for a, b in zip(alone, whole, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a[0], b[token])
    query, key = rows(32, 4 * size * 2, dtype=dtype, seed=seed).split([6 * size, 2 * size], dim=-1)
    positions, table = torch.arange(32), angles(2 * size)
    both = rotate(query, key, positions, table, 2 * size, halves=True)
    single = rotate(query[one], key[one], positions[one], table, 2 * size, halves=True)
    assert all(torch.equal(a[0], b[token]) for a, b in zip(single, both, strict=True))


def test_threads_do_not_change_a_bit() -> None:
    x, weight, positions = rows(700, 512), rows(512), torch.arange(700) % 50
    table = angles(64)
    results = []
    for num in (1, 3):
        with kernel_threads(num):
            results.append(
                (rms_norm(x, weight, 1e-6)[0], *rotate(x, x, positions, table, 64, halves=True))
            )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_tokens() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6)[0].shape == (0, 8)
    empty = torch.empty(0, 16)
    got = rotate(empty, empty, torch.empty(0, dtype=torch.int64), angles(8), 8, halves=True)
    assert got[0].shape == (0, 16)


def test_bad_input_is_refused() -> None:
    x, weight = rows(3, 8), rows(8)
    for bad in (
        (x.double(), weight.double()),
        (x, weight.bfloat16()),
        (rows(8, 3).T, weight),
        (rows(3, 2, 2, 8), weight),
        (torch.tensor(1.0), torch.tensor([1.0])),
        (x, rows(9)),
    ):
        with pytest.raises(ValueError, match=r"got .*, expected"):
            rms_norm(*bad, 1e-6)
    with pytest.raises(ValueError, match=r"residual \[2, 8\] .*, expected"):
        rms_norm(x, weight, 1e-6, rows(2, 8))
    query, positions, table = rows(3, 16), torch.arange(3), angles(8)
    for bad, size in (
        ((query, query.bfloat16(), positions, table), 8),
        ((query, query, positions.int(), table), 8),
        ((query, query, positions, table.double()), 8),
        ((query, query, positions[:2], table), 8),
        ((query, query, positions, table), 6),
        ((query, query, positions, angles(16)), 8),
    ):
        with pytest.raises(ValueError, match=r"rotate: got .*, expected"):
            rotate(*bad, size, halves=True)
    for place in (-1, 50):
        with pytest.raises(ValueError, match=rf"token 1 has position {place}, expected 0 to 49"):
            rotate(query, query, torch.tensor([0, place, 1]), table, 8, halves=True)
