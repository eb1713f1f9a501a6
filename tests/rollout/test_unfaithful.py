"""What SGLang would run otherwise than config.json says is refused before it starts."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.engines.sglang.unfaithful import refuse_unfaithful, refuse_unread_keys
from mrl.errors import InputError


def test_architectures_that_sglang_runs_in_part() -> None:
    qwen = SimpleNamespace(model_type="qwen2_moe")
    for late in (SimpleNamespace(model_type="mixtral"), SimpleNamespace(model_type="olmoe")):
        with pytest.raises(
            InputError, match=r"SGLang 0.5.21 cannot record its routes; install SGLang 0.5.22 or"
        ):
            refuse_unfaithful(late, on_gpu=True, return_routes=True, release="0.5.21")
        refuse_unfaithful(late, on_gpu=False, return_routes=False, release="0.5.21")
        refuse_unfaithful(late, on_gpu=False, return_routes=True)
    refuse_unfaithful(qwen, on_gpu=False, return_routes=True)
    deepseek = SimpleNamespace(model_type="deepseek_v3")
    with pytest.raises(InputError, match="latent attention is wrong"):
        refuse_unfaithful(deepseek, on_gpu=False, return_routes=True)


def test_gpt_oss_needs_a_release_that_the_plug_in_was_made_for() -> None:
    config = SimpleNamespace(model_type="gpt_oss")
    with pytest.raises(
        InputError, match=r"'gpt_oss': mrl has no plug-in .*; install SGLang 0.5.23"
    ):
        refuse_unfaithful(config, on_gpu=True, return_routes=False, release="0.5.22")
    refuse_unfaithful(config, on_gpu=False, return_routes=True, release="0.5.23")


def test_qwen3_next_needs_a_gpu_and_experts_in_every_layer() -> None:
    config = {"model_type": "qwen3_next", "mlp_only_layers": [], "decoder_sparse_step": 1}
    refuse_unfaithful(SimpleNamespace(**config), on_gpu=True, return_routes=True)
    with pytest.raises(InputError, match=r"'qwen3_next': on a CPU .* roll it out on GPUs"):
        refuse_unfaithful(SimpleNamespace(**config), on_gpu=False, return_routes=True)
    dense = SimpleNamespace(**config | {"mlp_only_layers": [1]})
    with pytest.raises(InputError, match="would run every layer as MoE"):
        refuse_unfaithful(dense, on_gpu=True, return_routes=True)


NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "rope_theta": 5e6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_theta": ...}, "rope_theta 5000000.0 in its RoPE settings: SGLang would take 10000"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.25 in .* would take 0.5"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": ...}, "RoPE type 'yarn': SGLang"),
        ({"full_attention_interval": ...}, "no full_attention_interval, from which SGLang derives"),
        ({"full_attention_interval": 2}, "interval 2, .* other kinds of layers than layer_types"),
    ],
)
def test_what_sglang_does_not_read_of_qwen3_next(changes: dict[str, Any], match: str) -> None:
    refuse_unread_keys(SimpleNamespace(**NEXT))
    refuse_unread_keys(SimpleNamespace(model_type="qwen3"))
    config = {key: value for key, value in (NEXT | changes).items() if value is not ...}
    with pytest.raises(InputError, match=f"model 'qwen3_next' with .*{match}"):
        refuse_unread_keys(SimpleNamespace(**config))


@pytest.mark.parametrize(
    "model_type", ["mixtral", "olmoe", "glm4_moe", "qwen2_moe", "qwen3_moe", "qwen3_next", "llama"]
)
def test_what_sglang_ignores_in_a_config(model_type: str) -> None:
    sizes = {"model_type": model_type, "hidden_size": 32, "num_attention_heads": 4}
    tied = SimpleNamespace(**sizes, tie_word_embeddings=True)
    wide = SimpleNamespace(**sizes, head_dim=16)
    for config, is_refused, match in (
        (tied, model_type != "llama", "would not tie its output layer"),
        (wide, model_type in ("mixtral", "qwen2_moe"), "head_dim 16: SGLang would take"),
        (SimpleNamespace(**sizes, head_dim=8), False, ""),
    ):
        with pytest.raises(InputError, match=match) if is_refused else nullcontext():
            refuse_unfaithful(config, on_gpu=True, return_routes=True)


OLMOE: dict[str, Any] = {
    "model_type": "olmoe",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": False,
}


@pytest.mark.parametrize(
    ("changes", "num_ranks", "match"),
    [
        ({}, 2, "over all heads on one rank only; set rollout.tensor_parallel_size=1"),
        ({"num_key_value_heads": 8}, 1, "num_key_value_heads 8: SGLang supports only"),
        ({"norm_topk_prob": True}, 1, "would not renormalise the gate weights"),
        ({"rms_norm_eps": 1e-6}, 1, "rms_norm_eps 1e-06: SGLang would take 1e-05"),
    ],
)
def test_what_sglang_has_fixed_in_olmoe(
    changes: dict[str, Any], num_ranks: int, match: str
) -> None:
    refuse_unfaithful(SimpleNamespace(**OLMOE), on_gpu=True, return_routes=True)
    config = SimpleNamespace(**(OLMOE | changes))
    with pytest.raises(InputError, match=f"model 'olmoe' .*{match}"):
        refuse_unfaithful(config, on_gpu=True, return_routes=True, num_ranks=num_ranks)
