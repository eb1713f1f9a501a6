"""fused_experts against its fp64 oracle, and the bits of a token alone and among others."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrl.kernels import (
    SWIGLU,
    GatedActivation,
    fused_experts,
    gpt_oss_swiglu,
    oracle,
    supports_fused_experts,
)
from tests.kernels.threads import kernel_threads

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Layer(NamedTuple):
    """The tensors of fused_experts."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def make(
    num_tokens: int,
    *,
    hidden: int = 40,
    size: int = 24,
    num_experts: int = 5,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Layer:
    """Make random weights and routes; a third of the routes' places has no expert."""
    rng = torch.Generator().manual_seed(seed)
    x, w13, w2 = (
        torch.randn(*shape, generator=rng).mul(scale).to(dtype)
        for shape, scale in (
            ((num_tokens, hidden), 1.5),
            ((num_experts, 2 * size, hidden), hidden**-0.5),
            ((num_experts, hidden, size), size**-0.5),
        )
    )
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k).indices
    ids[torch.rand(num_tokens, top_k, generator=rng) < 1 / 3] = -1
    return Layer(x, w13, w2, ids, torch.rand(num_tokens, top_k, generator=rng))


def check(layer: Layer, activation: GatedActivation = SWIGLU, **biases: Tensor) -> Tensor:
    got = fused_experts(*layer, activation, **biases)
    assert got.dtype == layer.x.dtype
    exact = oracle.fused_experts(*layer, **activation._asdict(), **biases)
    error = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), exact, atol=error, rtol=error)
    return got


ACTIVATIONS = [
    SWIGLU,
    gpt_oss_swiglu(1.702, 0.5),
    GatedActivation(alpha=0.7, limit=0.3),
    GatedActivation(interleaved=True, up_shift=-0.5),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_matches_the_oracle(activation: GatedActivation, dtype: torch.dtype) -> None:
    check(make(37, dtype=dtype), activation)


@pytest.mark.parametrize(("hidden", "size"), [(8, 8), (16, 40), (72, 8), (64, 32), (128, 136)])
def test_sizes(hidden: int, size: int) -> None:
    for activation in ACTIVATIONS[:2]:
        check(make(9, hidden=hidden, size=size), activation)


def test_biases() -> None:
    layer = make(70, num_experts=3)
    w13_bias, w2_bias = torch.randn(3, 48), torch.randn(3, 40).bfloat16()
    for activation in ACTIVATIONS:
        check(layer, activation, w13_bias=w13_bias, w2_bias=w2_bias)
    check(layer, w2_bias=w2_bias)


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 64, 100])
def test_one_expert_gets_all_tokens(num_tokens: int) -> None:
    check(make(num_tokens, num_experts=1, top_k=1))


def test_tokens_without_experts_are_zero() -> None:
    layer = make(12)
    layer.topk_ids[3:7] = -1
    assert not check(layer)[3:7].any()
    assert not check(layer._replace(topk_ids=torch.full_like(layer.topk_ids, -1))).any()


def test_large_and_small_products() -> None:
    """The activation neither overflows nor gives NaN far from 0."""
    layer = make(20)
    layer.x.mul_(300)
    got = fused_experts(*layer)
    assert got.isfinite().all()
    exact = oracle.fused_experts(*layer)
    error = 2e-6 * float(exact.abs().max())
    torch.testing.assert_close(got.double(), exact, atol=error, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 31),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(ACTIVATIONS),
    st.integers(1, 6),
)
def test_a_token_alone_has_the_bits_it_has_among_others(
    token: int, seed: int, dtype: torch.dtype, activation: GatedActivation, num_experts: int
) -> None:
    layer = make(32, num_experts=num_experts, top_k=1 + seed % num_experts, dtype=dtype, seed=seed)
    whole = fused_experts(*layer, activation)
    one = slice(token, token + 1)
    alone = layer._replace(
        x=layer.x[one], topk_ids=layer.topk_ids[one], topk_weights=layer.topk_weights[one]
    )
    assert torch.equal(fused_experts(*alone, activation)[0], whole[token])


def test_threads_do_not_change_a_bit() -> None:
    layers = [make(200, hidden=128, size=64), make(40, hidden=256, size=128, num_experts=16)]
    with kernel_threads(1):
        single = [fused_experts(*layer) for layer in layers]
    with kernel_threads(3):
        for layer, bits in zip(layers, single, strict=True):
            assert torch.equal(fused_experts(*layer), bits)


def test_bad_input_is_refused() -> None:
    layer = make(5)

    def refuse(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            fused_experts(*layer._replace(**changes))

    assert supports_fused_experts(*layer[:3])
    assert not supports_fused_experts(layer.x, layer.w13, layer.w2.transpose(1, 2))
    refuse("multiples of 8", x=layer.x[:, :36].contiguous())
    refuse("got x .* of torch.float64", x=layer.x.double())
    refuse("contiguous", w13=layer.w13.transpose(0, 1))
    refuse(r"w13: got shape .* expected \[5, 48, 40\]", w13=layer.w13[:, :40].contiguous())
    refuse(r"topk_ids: got shape \[4, 2\]", topk_ids=layer.topk_ids[:4])
    refuse("topk_ids: got dtype torch.float32", topk_ids=layer.topk_ids.float())
    refuse(r"topk_weights: got shape \[5, 1\]", topk_weights=layer.topk_weights[:, :1])
    refuse("topk_weights: got dtype torch.float64", topk_weights=layer.topk_weights.double())
    refuse(
        "token 2 has expert 5, expected -1 to 4",
        topk_ids=layer.topk_ids.index_fill(0, torch.tensor([2]), 5),
    )
    refuse("token 0 has expert -2", topk_ids=layer.topk_ids.index_fill(0, torch.tensor([0]), -2))
    refuse(r"topk_ids: got \[\], expected", topk_ids=torch.tensor(0))
    for limit in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"limit: got {limit}, expected at least 0"):
            fused_experts(*layer, GatedActivation(limit=limit))
    with pytest.raises(ValueError, match=r"w2_bias: got shape \[5\]"):
        fused_experts(*layer, w2_bias=torch.zeros(5))
