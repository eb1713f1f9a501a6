"""Checks that SGLang can run a model with a recipe, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mrl.config import RolloutConfig
from mrl.engines.sglang.arguments import check_server_args
from mrl.engines.sglang.decode import refuse_weights, route_shape
from mrl.engines.sglang.external_models import import_external_models, refuse_unknown
from mrl.engines.sglang.quantized import check_gpu, check_quantization
from mrl.engines.sglang.requests import longest_in_cache
from mrl.engines.sglang.settings import CPU_MAX_TOTAL_TOKENS
from mrl.engines.sglang.unfaithful import refuse_unfaithful, refuse_unread_keys
from mrl.errors import InputError


def check_limits(
    model_path: str | Path,
    config: RolloutConfig,
    *,
    on_gpu: bool,
    return_routes: bool,
    capability: tuple[int, int] | None = None,
) -> None:
    """Raise InputError if the engine would refuse the recipe at its start, or run the model wrongly.

    `capability` is the compute capability of the GPUs; None if it is unknown, or if weights are not
    quantised.

    The causes are bad `rollout.server_args`, an unreadable config.json, an architecture that SGLang
    runs wrongly or not at all, and an architecture whose routes or gate weights SGLang does not return
    although the recipe needs them, and GPUs on which SGLang rewrites quantised weights.
    """
    check_server_args(config.server_args)
    file = Path(model_path) / "config.json"
    try:
        hf_config = SimpleNamespace(**json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"model.path: {file} cannot be read: {error}") from None
    refuse_unknown(str(getattr(hf_config, "model_type", "")))
    refuse_unfaithful(
        hf_config,
        on_gpu=on_gpu,
        return_routes=return_routes,
        num_ranks=config.tensor_parallel_size,
    )
    refuse_unread_keys(hf_config)
    _refuse_fused_rope(hf_config, config.server_args)
    check_quantization(hf_config, config, config.weight_sync, on_gpu=on_gpu)
    if capability is not None:
        check_gpu(config, capability)
    if config.return_routing_weights:
        refuse_weights(on_gpu=on_gpu, return_routes=return_routes)


def _refuse_fused_rope(hf_config: Any, server_args: Mapping[str, Any]) -> None:
    """Raise InputError if SGLang would rotate with wrong angles: its kernel that fuses the norm of
    queries and keys with RoPE computes YaRN for every RoPE type except `default`."""
    rope = getattr(hf_config, "rope_scaling", None) or getattr(hf_config, "rope_parameters", None)
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind == "llama3" and server_args.get("enable_fused_qk_norm_rope"):
        raise InputError(
            "rollout.server_args.enable_fused_qk_norm_rope is true, but the model has RoPE type "
            "llama3, which SGLang's fused kernel computes as yarn; leave it out"
        )


def cache_len(config: RolloutConfig, *, on_gpu: bool) -> int | None:
    """Return the most tokens, prompt and answer, that one request may have in the KV cache; None if
    this number depends on the free memory when the engine starts."""
    kv_tokens = config.max_total_tokens or (None if on_gpu else CPU_MAX_TOTAL_TOKENS)
    if kv_tokens is None:
        return None
    page_size = config.server_args.get("page_size")
    return longest_in_cache(kv_tokens, page_size if isinstance(page_size, int) else 1)


def check_route_layers(
    model_path: str | Path, moe_layer_numbers: tuple[int, ...], num_experts: int
) -> None:
    """Raise InputError if SGLang derives from config.json other MoE layers, or another number of
    experts, than the recipe's `model.architecture` has. The engine's routes would then not fit the
    trainer.

    `moe_layer_numbers` (from 1) and `num_experts` are those of `model.architecture`.
    """
    # Slow to import, and only an architecture from outside needs it here.
    from transformers import AutoConfig

    import_external_models()
    shape = route_shape(AutoConfig.from_pretrained(model_path))
    for name, ours, theirs in (
        ("MoE layers", moe_layer_numbers, shape.moe_layer_numbers),
        ("experts", num_experts, shape.num_experts),
    ):
        if ours != theirs:
            raise InputError(
                f"model.architecture has the {name} {ours}, but the engine's routes would have "
                f"{theirs}, which follow from num_experts, mlp_only_layers, first_k_dense_replace and "
                "decoder_sparse_step of config.json; correct these keys, or set moe.routing_replay=r2"
            )
