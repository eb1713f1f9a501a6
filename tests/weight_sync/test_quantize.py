"""Buckets are quantised, packed and proved before they are sent."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import mrl.weight_sync.quantize as module
from mrl.errors import NotFinite
from mrl.kernels.digest import add_digests, digests_of
from mrl.quantization import SCHEMES, fake_quantize, is_quantized, with_rounding_noise
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket
from mrl.weight_sync.delta import LastVersion, Traffic
from mrl.weight_sync.quantize import quantized_buckets
from mrl.weight_sync.staging import Staging, header_of

FP8 = SCHEMES["fp8_block"]
LAYER = "model.layers.0."
EXPERT = LAYER + "mlp.experts.3.gate_proj.weight"
ROUTER = LAYER + "mlp.gate.weight"


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = {
        LAYER + "self_attn.q_proj.weight": (256, 130),
        LAYER + "self_attn.q_proj.bias": (256,),
        ROUTER: (8, 130),
        EXPERT: (96, 130),
        LAYER + "input_layernorm.weight": (130,),
        "model.embed_tokens.weight": (64, 130),
        "lm_head.weight": (64, 130),
    }
    return {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}


def buckets(tensors: dict[str, Tensor], num: int = 2) -> list[WeightBucket]:
    pairs = list(tensors.items())
    parts = [pairs[i::num] for i in range(num)]
    return [
        WeightBucket(part, 7, is_last=part is parts[-1], digest=add_digests(digests_of(part)))
        for part in parts
    ]


def encode(found: list[WeightBucket], name: str = "fp8_block") -> list[WeightBucket]:
    return list(quantized_buckets(iter(found), name, SharedMemory()))


def test_none_leaves_the_buckets_as_they_are():
    given = buckets(weights())
    assert all(a is b for a, b in zip(given, encode(given, "none"), strict=True))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_sent_and_what_is_held(name: str, dtype: torch.dtype):
    scheme, given = SCHEMES[name], weights(dtype)
    for before, after in zip(buckets(given), encode(buckets(given), name), strict=True):
        sent = dict(after.tensors)
        held = {n: fake_quantize(scheme, n, given[n]) for n, _ in before.tensors}
        assert after.digest == add_digests(digests_of(held.items()))
        assert (after.version, after.is_last) == (before.version, before.is_last)
        assert after.flat is not None
        assert after.flat.numel() == after.num_bytes
        for n, _ in before.tensors:
            if not is_quantized(n, given[n].dim()):
                assert torch.equal(sent[n], given[n])
                continue
            assert sent[n].dtype == scheme.dtype
            scales = sent[n + scheme.suffix]
            assert scales.shape == scheme.scale_shape(*given[n].shape)
            assert torch.equal(scheme.dequantize(sent[n], scales, dtype), held[n])


def test_which_weights_are_quantised():
    given = weights()
    chosen = {name for name, tensor in given.items() if is_quantized(name, tensor.dim())}
    assert chosen == {LAYER + "self_attn.q_proj.weight", EXPERT}
    assert not is_quantized("model.layers.0.mlp.shared_expert_gate.weight", 2)
    assert is_quantized("model.layers.0.block_sparse_moe.experts.0.w2.weight", 2)


def test_a_matrix_takes_half_of_its_bytes_in_bf16():
    matrix = {EXPERT: torch.randn(1024, 2048).bfloat16()}
    (sent,) = encode(buckets(matrix, 1))
    assert sent.num_bytes <= 0.52 * matrix[EXPERT].numel() * 2


def test_values_other_than_those_of_the_export_are_refused():
    """As if the optimizer's float32 copies were quantised instead of the bfloat16 weights."""
    exported = weights()
    masters = {name: tensor.float() + 1e-4 for name, tensor in exported.items()}
    found = buckets(exported)
    for bucket in found:
        bucket.tensors[:] = [(name, masters[name]) for name, _ in bucket.tensors]
    with pytest.raises(RuntimeError, match="other digests than the ranks' shards"):
        encode(found)


@pytest.mark.parametrize("fault", ["a stale scale", "a transposed block", "a dropped element"])
def test_what_rounding_does_not_explain_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch):
    def spoiled(weight: Tensor) -> tuple[Tensor, Tensor]:
        quantized, scales = FP8.quantize(weight)
        if fault == "a stale scale":
            scales[0, 0] *= 1.5
        elif fault == "a transposed block":
            block = quantized[:64, :64].clone()
            quantized[:64, :64] = block.T
        else:
            quantized.view(torch.uint8)[0, 0] = 0
        return quantized, scales

    broken = dict.fromkeys(SCHEMES, type(FP8)(**{**vars(FP8), "quantize": spoiled}))
    monkeypatch.setattr(module, "SCHEMES", broken)
    with pytest.raises(RuntimeError, match=r"the element \[\d+, \d+\] is"):
        encode(buckets(weights()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(bad: float):
    given = weights()
    given[EXPERT][1, 2] = bad
    with pytest.raises(NotFinite, match="gate_proj"):
        encode(buckets(given))


def test_an_export_is_drained_after_an_error():
    given = weights()
    given[EXPERT][1, 2] = torch.nan
    taken = []

    def export():
        for bucket in buckets(given, 4):
            taken.append(bucket)
            yield bucket

    with pytest.raises(NotFinite):
        list(quantized_buckets(export(), "fp8_block", SharedMemory()))
    assert len(taken) == 4


@pytest.mark.parametrize("name", SCHEMES)
def test_noise_changes_weights_that_are_exact_in_the_format(name: str):
    exact = fake_quantize(SCHEMES[name], EXPERT, weights()[EXPERT].float())
    noisy = with_rounding_noise(SCHEMES[name], EXPERT, exact)
    assert 1e-3 < float((noisy - exact).norm() / exact.norm()) < 0.1
    assert torch.equal(noisy, with_rounding_noise(SCHEMES[name], EXPERT, exact))
    assert with_rounding_noise(SCHEMES[name], ROUTER, exact) is exact


@pytest.mark.parametrize("name", SCHEMES)
def test_quantised_versions_travel_as_deltas(name: str):
    """A few weights change, one of them the largest of its block, so that its scale changes too."""
    first, last, staging = weights(), LastVersion(), Staging()
    second = {key: weight.clone() for key, weight in first.items()}
    second[EXPERT][3, 7] = -second[EXPERT][3, 7]
    second[EXPERT][90, 129] *= 8
    second["lm_head.weight"][0, :3] += 1
    for version, given in enumerate((first, second)):
        staging.begin(version, None, staging if version else None)
        last.begin(version)
        for bucket in encode(buckets(given), name):
            assert bucket.flat is not None
            delta = last.replace(bucket, Traffic(), wants_delta=version > 0)
            if delta is None:
                assert not version
                staging.room(header_of(bucket)).copy_(bucket.flat)
            else:
                assert delta.payload.numel() < 0.1 * bucket.num_bytes
                header = json.loads(json.dumps({**header_of(bucket), "delta": delta.header()}))
                assert staging.patch(header, delta.payload) == ""
        staging.finish()
        last.finish()
    expected = [pair for bucket in encode(buckets(second), name) for pair in bucket.tensors]
    found = [pair for bucket in staging.buckets() for pair in bucket.tensors]
    for (key, sent), (other, held) in zip(expected, found, strict=True):
        assert (key, sent.dtype) == (other, held.dtype)
        assert torch.equal(sent.view(torch.uint8), held.view(torch.uint8)), key


def test_what_is_sent_has_digests_too():
    """A worker that makes a bucket from a delta compares these before the engine loads it."""
    for bucket in encode(buckets(weights())):
        assert bucket.sent_digest == add_digests(digests_of(bucket.tensors))
        assert bucket.sent_digest != bucket.digest
