"""Qwen3-MoE: GQA with query/key norms, RoPE, SwiGLU, RMSNorm, softmax top-k routing.

Source: `Qwen3MoeForCausalLM` of transformers and the Qwen3 technical report (arXiv 2505.09388).
"""

from __future__ import annotations

from typing import Any

from mrl.errors import InputError
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.dims import ModelSizes


def num_experts(hf: HfConfig) -> int:
    """transformers 5 writes the count under another name than transformers 4."""
    return hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"]


def moe_layer_numbers(hf: HfConfig) -> tuple[int, ...]:
    """A layer is dense when `mlp_only_layers` names it or `decoder_sparse_step` skips it."""
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    return tuple(
        layer + 1
        for layer in range(hf["num_hidden_layers"])
        if layer not in dense and num_experts(hf) > 0 and (layer + 1) % step == 0
    )


def sizes(hf: HfConfig) -> ModelSizes:
    has_dense = len(moe_layer_numbers(hf)) < hf["num_hidden_layers"]
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        vocab_size=hf["vocab_size"],
        dense_ffn_size=hf["intermediate_size"] if has_dense else 0,
        num_experts=num_experts(hf),
        moe_ffn_size=hf["moe_intermediate_size"],
    )


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    _refuse_unsupported(hf)
    moe = set(moe_layer_numbers(hf))
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "num_moe_experts": num_experts(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [int(n + 1 in moe) for n in range(hf["num_hidden_layers"])],
        # With norm_topk_prob the softmax runs over the chosen experts only, which is the same as
        # renormalising the chosen shares of a softmax over all; without it, over all experts.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
    }


def _refuse_unsupported(hf: HfConfig) -> None:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    for wrong, what in (
        (hf.get("attention_bias"), "attention_bias"),
        (hf.get("use_sliding_window"), "use_sliding_window"),
        (kind != "default", f"RoPE type {kind!r}"),
        (hf.get("hidden_act", "silu") != "silu", f"hidden_act {hf.get('hidden_act')!r}"),
    ):
        if wrong:
            raise InputError(f"config.json: {what} is not supported for qwen3_moe")


def rules(hf: HfConfig) -> list[Rule]:
    layer, hf_layer = "decoder.layers.{layer}", "model.layers.{layer}"
    attention, hf_attention = f"{layer}.self_attention", f"{hf_layer}.self_attn"
    expert = f"{layer}.mlp.experts.local_experts.{{expert}}"
    hf_expert = f"{hf_layer}.mlp.experts.{{expert}}"
    qkv = tuple(f"{hf_attention}.{x}_proj.weight" for x in "qkv")

    def gate_up(prefix: str) -> tuple[str, ...]:
        return (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")

    table = [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows"),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Rule(f"{layer}.input_layernorm.weight", (f"{hf_layer}.input_layernorm.weight",)),
        Rule(f"{layer}.pre_mlp_layernorm.weight", (f"{hf_layer}.post_attention_layernorm.weight",)),
        Rule(f"{attention}.linear_qkv.weight", qkv, "qkv"),
        Rule(f"{attention}.linear_proj.weight", (f"{hf_attention}.o_proj.weight",), "columns"),
        Rule(f"{attention}.q_layernorm.weight", (f"{hf_attention}.q_norm.weight",)),
        Rule(f"{attention}.k_layernorm.weight", (f"{hf_attention}.k_norm.weight",)),
        Rule(f"{layer}.mlp.router.weight", (f"{hf_layer}.mlp.gate.weight",)),
        Rule(f"{expert}.linear_fc1.weight", gate_up(hf_expert), "gated"),
        Rule(f"{expert}.linear_fc2.weight", (f"{hf_expert}.down_proj.weight",), "columns"),
        Rule(f"{layer}.mlp.linear_fc1.weight", gate_up(f"{hf_layer}.mlp"), "gated"),
        Rule(f"{layer}.mlp.linear_fc2.weight", (f"{hf_layer}.mlp.down_proj.weight",), "columns"),
    ]
    if not hf.get("tie_word_embeddings"):
        table.append(Rule("output_layer.weight", ("lm_head.weight",), "rows"))
    return table


ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=moe_layer_numbers,
)
