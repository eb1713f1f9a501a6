"""What SGLang cannot do for a model and a recipe, found before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from mrl.config import RolloutConfig
from mrl.errors import InputError
from mrl.rollout.sglang.arguments import check_server_args
from mrl.rollout.sglang.decode import refuse_unfaithful, refuse_weights, route_shape
from mrl.rollout.sglang.external_models import import_external_models, refuse_unknown
from mrl.rollout.sglang.requests import longest_in_cache
from mrl.rollout.sglang.settings import CPU_MAX_TOTAL_TOKENS


def check_limits(
    model_path: str | Path, config: RolloutConfig, *, on_gpu: bool, return_routes: bool
) -> None:
    """Raise InputError for what the engine would refuse at its start, or run wrongly.

    These are SGLang's arguments, the architectures that it runs as another model or not at all, and
    those whose routes or gate weights it does not return.
    """
    check_server_args(config.server_args)
    file = Path(model_path) / "config.json"
    try:
        hf_config = SimpleNamespace(**json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"model.path: {file} cannot be read: {error}") from None
    refuse_unknown(str(getattr(hf_config, "model_type", "")))
    refuse_unfaithful(hf_config, on_gpu=on_gpu, return_routes=return_routes)
    if config.return_routing_weights:
        refuse_weights(on_gpu=on_gpu, return_routes=return_routes)


def cache_len(config: RolloutConfig, *, on_gpu: bool) -> int | None:
    """Return the most tokens of one request that the KV cache will hold; None if that depends on the
    memory that the engine finds."""
    kv_tokens = config.max_total_tokens or (None if on_gpu else CPU_MAX_TOTAL_TOKENS)
    if kv_tokens is None:
        return None
    page_size = config.server_args.get("page_size")
    return longest_in_cache(kv_tokens, page_size if isinstance(page_size, int) else 1)


def check_route_layers(
    model_path: str | Path, moe_layer_numbers: tuple[int, ...], num_experts: int
) -> None:
    """Raise InputError where the engine would read other MoE layers (1-based), or another number of
    experts, from config.json than the recipe's `model.architecture` does: routes would not fit."""
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
