"""A real engine with quantised weights: what it holds and computes, and which updates it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_helpers import make_buckets, make_engine, make_prompts
from torch import Tensor

import mrl.quantization as module
from mrl.config import RolloutConfig
from mrl.engines.sglang.arguments import check_server_args
from mrl.engines.sglang.digests import ACTION, check_quantized, quantized_modules
from mrl.engines.sglang.engine import Engine
from mrl.engines.sglang.limits import check_limits
from mrl.engines.sglang.quantized import check_gpu, check_quantization, engine_modules
from mrl.errors import InputError
from mrl.quantization import SCHEMES, fake_quantize
from mrl.system.shared_memory import SharedMemory
from mrl.types import WeightBucket
from mrl.weight_sync.quantize import quantized_buckets

Weights = list[tuple[str, Tensor]]
SCHEME = SCHEMES["fp8_block"]


@pytest.fixture(scope="module")
def quantized_engine(
    toy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    engine = make_engine(toy_folder, log, quantization="fp8_block")
    engine.start()
    yield engine
    engine.stop()


def encoded(weights: Weights, version: int) -> Iterator[WeightBucket]:
    return quantized_buckets(make_buckets(weights, version), SCHEME.name, SharedMemory())


def test_only_the_expected_modules_are_quantised(quantized_engine: Engine, toy_weights: Weights):
    quantized_engine.endpoint.update_weights(encoded(toy_weights, 1), 1)
    answer = quantized_engine.connection.post("/weights_checker", {"action": ACTION})
    found = quantized_modules(answer)
    assert found == engine_modules(name for name, _ in toy_weights)
    assert {name.rpartition(".")[2] for name in found} == {"qkv_proj", "o_proj", "experts"}
    check_quantized(found, found)
    with pytest.raises(RuntimeError, match=r"not quantised there: model\.layers\.9\.mlp"):
        check_quantized({*found, "model.layers.9.mlp"}, found)
    with pytest.raises(RuntimeError, match="quantised there alone: "):
        check_quantized(sorted(found)[1:], found)


def test_log_probs_are_those_of_a_quantised_model(
    quantized_engine: Engine, toy_weights: Weights, oracle: torch.nn.Module
):
    """Closer to the model with quantised weights than to the original one."""
    quantized_engine.endpoint.update_weights(encoded(toy_weights, 2), 2)
    sequences = [prompt.token_ids for prompt in make_prompts(6)]
    got = quantized_engine.endpoint.sequence_logprobs(sequences)
    held = {name: fake_quantize(SCHEME, name, weight) for name, weight in toy_weights}
    before = mean_gap(oracle, sequences, got)
    original = {name: value.clone() for name, value in oracle.state_dict().items()}
    try:
        load(oracle, held)
        after = mean_gap(oracle, sequences, got)
    finally:
        oracle.load_state_dict(original)
    assert 1e-3 < after < before


def load(oracle: Any, weights: dict[str, Tensor]) -> None:
    """Load weights under the names of a checkpoint into a model of transformers."""
    from transformers import Qwen3MoeForCausalLM

    made = Qwen3MoeForCausalLM.from_pretrained(None, config=oracle.config, state_dict=weights)
    oracle.load_state_dict(made.state_dict())


def mean_gap(oracle: torch.nn.Module, sequences: list[Tensor], got: list[Tensor]) -> float:
    gaps = []
    for ids, logprobs in zip(sequences, got, strict=True):
        with torch.no_grad():
            logits = oracle(ids[None]).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        gaps.append((logprobs[1:] - expected).abs())
    return float(torch.cat(gaps).mean())


@pytest.mark.parametrize("fault", ["a stale scale", "a layer is skipped", "nothing is quantised"])
def test_a_wrong_update_is_refused(
    quantized_engine: Engine, toy_weights: Weights, fault: str, monkeypatch: pytest.MonkeyPatch
):
    if fault == "a layer is skipped":  # as a match of parts of names would do
        only = module.is_quantized
        monkeypatch.setattr(
            module, "is_quantized", lambda name, dims: only(name, dims) and "gate" not in name
        )
    made = encoded(toy_weights, 3)
    if fault == "a stale scale":
        made = with_stale_scale(made)
    elif fault == "nothing is quantised":
        made = make_buckets(toy_weights, 3)
    with pytest.raises((RuntimeError, ValueError), match="update_weights"):
        quantized_engine.endpoint.update_weights(made, 3)
    assert quantized_engine.endpoint.weight_version is None
    monkeypatch.undo()
    quantized_engine.endpoint.update_weights(encoded(toy_weights, 4), 4)
    assert quantized_engine.endpoint.weight_version == 4


def test_the_report_of_quantised_modules_is_compared_at_every_update(
    quantized_engine: Engine, toy_weights: Weights, monkeypatch: pytest.MonkeyPatch
):
    """As if the engine computed one module less, or one more, with quantised weights."""
    manifest = quantized_engine.core.manifest
    known = sorted(manifest.quantized_modules)
    for expected, says in ((known[1:], "quantised there alone: "), ([*known, "x"], "there: x")):
        monkeypatch.setattr(manifest, "quantized_modules", set(expected))
        with pytest.raises(RuntimeError, match=says):
            quantized_engine.endpoint.update_weights(encoded(toy_weights, 5), 5)
        assert quantized_engine.endpoint.weight_version is None
    monkeypatch.undo()
    quantized_engine.endpoint.update_weights(encoded(toy_weights, 6), 6)


def with_stale_scale(buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
    """Change one scale of the first bucket after its digest was computed."""
    for number, bucket in enumerate(buckets):
        if not number:
            name = next(name for name, _ in bucket.tensors if name.endswith(SCHEME.suffix))
            dict(bucket.tensors)[name][0, 0] *= 1.25
        yield bucket


def test_int8_is_refused_on_gpus():
    config = SimpleNamespace(model_type="qwen3_moe")
    rollout = RolloutConfig(quantization="int8", max_response_len=1)
    check_quantization(config, rollout, "tensor", on_gpu=False)
    with pytest.raises(InputError, match="int8 on a GPU"):
        check_quantization(config, rollout, "tensor", on_gpu=True)


@pytest.mark.parametrize(
    ("model_type", "quantization", "message"),
    [
        ("qwen3_moe", "none", r"stored in fp8, .* set rollout\.quantization=fp8_block"),
        ("qwen3_moe", "int8", r"stored in fp8, .* set rollout\.quantization=fp8_block"),
        ("qwen3_moe", "fp8_block", None),
        ("deepseek_v3", "none", "give the weights in bfloat16, and set it to none"),
        ("deepseek_v3", "fp8_block", "give the weights in bfloat16, and set it to none"),
    ],
)
def test_what_can_be_done_with_weights_in_fp8(
    model_type: str, quantization: str, message: str | None
):
    """What one message says to set is not what the next one refuses."""
    config = SimpleNamespace(model_type=model_type, quantization_config={"quant_method": "fp8"})
    rollout = RolloutConfig.model_validate({"quantization": quantization, "max_response_len": 1})
    if message is None:
        check_quantization(config, rollout, "tensor", on_gpu=False)
        return
    with pytest.raises(InputError, match=message):
        check_quantization(config, rollout, "tensor", on_gpu=False)


TRITON = {"fp8_gemm_runner_backend": "triton", "moe_runner_backend": "triton"}


@pytest.mark.parametrize("quantization", ["fp8_block", "fp8_block_ue8m0"])
@pytest.mark.parametrize(
    ("capability", "server_args", "message"),
    [
        ((8, 6), TRITON, r"compute capability 8\.6: SGLang would repack"),
        ((8, 9), {}, None),
        ((9, 0), {}, None),
        ((9, 0), {"moe_runner_backend": "deep_gemm"}, None),
        ((10, 0), {}, "10.0 with fp8_gemm_runner_backend=auto: "),
        ((10, 3), {"fp8_gemm_runner_backend": "deep_gemm"}, "fp8_gemm_runner_backend=deep_gemm: "),
        (
            (10, 0),
            TRITON | {"moe_runner_backend": "deep_gemm"},
            "with moe_runner_backend=deep_gemm: ",
        ),
        ((10, 0), {"moe_a2a_backend": "deepep"}, "backend=auto and moe_a2a_backend=deepep: "),
        ((10, 0), TRITON, None),
        ((10, 0), {"fp8_gemm_runner_backend": "flashinfer_trtllm"}, None),
        ((12, 0), {}, None),
    ],
)
def test_gpus_on_which_sglang_rewrites_the_weights_are_refused(
    quantization: str,
    capability: tuple[int, int],
    server_args: dict[str, str],
    message: str | None,
    toy_folder: Path,
):
    rollout = RolloutConfig(
        quantization=quantization,  # pyright: ignore[reportArgumentType]
        max_response_len=1,
        server_args=server_args,
    )
    check_server_args(server_args)  # the installed SGLang has these fields and choices
    if message is None:
        check_gpu(rollout, capability)
        return
    with pytest.raises(InputError, match=message) as refused:
        check_limits(toy_folder, rollout, on_gpu=True, return_routes=True, capability=capability)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_sync": "disk"},
        {"batch_invariant": True},
        {"server_args": {"load_format": "auto"}},
        {"server_args": {"json_model_override_args": "[]"}},
    ],
)
def test_keys_that_do_not_go_together(toy_folder: Path, tmp_path: Path, changes: dict):
    with pytest.raises(InputError, match=r"rollout\.quantization=int8"):
        make_engine(toy_folder, tmp_path / "log", quantization="int8", **changes)
