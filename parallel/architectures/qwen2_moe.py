"""Qwen2-MoE and Qwen1.5-MoE: GQA with biases, RoPE, SwiGLU, softmax top-k routing, and a shared
expert with a gate.

Source: `Qwen2MoeForCausalLM` of transformers and the Qwen2 technical report (arXiv 2407.10671).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.dims import ModelSizes


def moe_layer_numbers(hf: HfConfig) -> tuple[int, ...]:
    return common.sparse_layers(hf, hf["num_experts"])


def sizes(hf: HfConfig) -> ModelSizes:
    has_dense = len(moe_layer_numbers(hf)) < hf["num_hidden_layers"]
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=common.query_groups(hf),
        vocab_size=hf["vocab_size"],
        dense_ffn_size=hf["intermediate_size"] if has_dense else 0,
        num_experts=hf["num_experts"],
        moe_ffn_size=hf["moe_intermediate_size"],
        shared_expert_ffn_size=hf["shared_expert_intermediate_size"],
    )


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    common.refuse_unsupported(hf)
    common.refuse_constant_gate(hf, "norm_topk_prob")
    return {
        **common.decoder_config(hf, moe_layer_numbers(hf)),
        **common.grouped_query_config(hf),
        "add_qkv_bias": has_bias(hf),
        "num_moe_experts": hf["num_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_pre_softmax": not hf["norm_topk_prob"],  # as in qwen3_moe
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,  # sigmoid of one row times the shared expert's output
    }


def has_bias(hf: HfConfig) -> bool:
    """Return whether query, key and value have biases: `qkv_bias` in config.json, by default True."""
    return hf.get("qkv_bias", True)


def rules(hf: HfConfig) -> list[Rule]:
    mlp, hf_mlp = f"{common.LAYER}.mlp", f"{common.HF_LAYER}.mlp"
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(bias=has_bias(hf)),
        Rule(f"{mlp}.router.weight", (f"{hf_mlp}.gate.weight",)),
        *common.mlp_rules(common.EXPERT, f"{hf_mlp}.experts.{{expert}}"),
        *common.mlp_rules(common.SHARED_EXPERT, f"{hf_mlp}.shared_expert"),
        Rule(f"{common.SHARED_EXPERT}.gate_weight", (f"{hf_mlp}.shared_expert_gate.weight",)),
        *common.mlp_rules(mlp, hf_mlp),
    ]


ARCHITECTURE = Architecture(
    model_type="qwen2_moe",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=moe_layer_numbers,
)
