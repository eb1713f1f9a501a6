"""Names and shapes of a language model's whole weights, from its config.json alone. No Megatron.

Which names there are follows from an architecture's rules, and the shape of each from Megatron's
settings, which mean the same in all architectures. h hidden size, q query heads, g query groups, d
columns of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel.hf_config import HfModel

Shape = tuple[int, ...]
DENSE_LAYER, ANY_MLP = "decoder.layers.{layer}.mlp.linear_fc", "decoder.layers.{layer}.mlp."


def weight_shapes(model: HfModel) -> dict[str, Shape]:
    """Megatron name in the whole model, e.g. `decoder.layers.3.mlp.router.weight` -> its whole shape.

    Raises ValueError for a rule whose weight has no row in the tables below.
    """
    config, sizes = model.config, model.sizes
    settings = model.architecture.transformer_config(config)
    moe_layers = {number - 1 for number in model.moe_layer_numbers}
    dense_layers = set(range(sizes.num_layers)) - moe_layers
    shapes: dict[str, Shape] = {}
    for rule in model.architecture.rules(config):
        shape = _shape(rule.megatron, model, settings)
        if shape is None:
            continue
        layers = set(range(sizes.num_layers if "{layer}" in rule.megatron else 1))
        if rule.megatron.startswith(ANY_MLP):
            layers = dense_layers if rule.megatron.startswith(DENSE_LAYER) else moe_layers
        experts = range(sizes.num_experts if "{expert}" in rule.megatron else 1)
        for layer in layers:
            shapes |= {rule.megatron.format(layer=layer, expert=e): shape for e in experts}
    return shapes


def _shape(name: str, model: HfModel, settings: Mapping[str, Any]) -> Shape | None:
    """Of one rule's weight; None where these settings have no such weight."""
    sizes, h = model.sizes, settings["hidden_size"]
    if ".mlp." in name:
        table = _mlp_shapes(name, model, h)
    elif ".self_attention." in name:
        latent = settings.get("multi_latent_attention")
        table = _latent_shapes(settings) if latent else _grouped_query_shapes(settings)
    else:
        vocabulary = (sizes.vocab_size, h)
        table = {"word_embeddings": vocabulary, "output_layer": vocabulary}
        table |= dict.fromkeys(("final_layernorm", "input_layernorm", "pre_mlp_layernorm"), (h,))
    part = _part(name)
    if part not in table:
        raise ValueError(f"no shape for the weight {name}; give it a row in parallel.weight_shapes")
    return table[part]


def _part(name: str) -> str:
    """`a.b.linear_qkv.weight` -> `linear_qkv`, and `a.b.linear_qkv.bias` -> `linear_qkv.bias`."""
    *_, module, kind = name.split(".")
    return module if kind == "weight" else f"{module}.{kind}"


def _mlp_shapes(name: str, model: HfModel, h: int) -> dict[str, Shape | None]:
    sizes = model.sizes
    columns = sizes.dense_ffn_size
    if ".shared_experts." in name:
        columns = sizes.shared_expert_ffn_size
    elif ".experts." in name:
        columns = sizes.moe_ffn_size
    return {
        "linear_fc1": (2 * columns, h),  # gate and up projection
        "linear_fc2": (h, columns),
        "router": (sizes.num_experts, h),
        "router.expert_bias": (sizes.num_experts,),
        "shared_experts.gate_weight": (1, h),
    }


def _grouped_query_shapes(settings: Mapping[str, Any]) -> dict[str, Shape | None]:
    h, d = settings["hidden_size"], settings["kv_channels"]
    q, g = settings["num_attention_heads"], settings["num_query_groups"]
    return {
        "linear_qkv": ((q + 2 * g) * d, h),
        "linear_qkv.bias": ((q + 2 * g) * d,),
        "linear_proj": (h, q * d),
        "q_layernorm": (d,),
        "k_layernorm": (d,),
    }


def _latent_shapes(settings: Mapping[str, Any]) -> dict[str, Shape | None]:
    """MLA (arXiv 2405.04434 section 2.1): queries from a latent, or without q_lora_rank from h."""
    h, q = settings["hidden_size"], settings["num_attention_heads"]
    q_rank, kv_rank = settings["q_lora_rank"], settings["kv_lora_rank"]
    nope, rope, value = (
        settings[key] for key in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    )
    queries = q * (nope + rope)
    return {
        "linear_q_proj": None if q_rank else (queries, h),
        "linear_q_down_proj": (q_rank, h) if q_rank else None,
        "q_layernorm": (q_rank,) if q_rank else None,
        "linear_q_up_proj": (queries, q_rank) if q_rank else None,
        "linear_kv_down_proj": (kv_rank + rope, h),
        "kv_layernorm": (kv_rank,),
        "linear_kv_up_proj": (q * (nope + value), kv_rank),
        "linear_proj": (h, q * value),
    }
