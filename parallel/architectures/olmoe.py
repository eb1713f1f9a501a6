"""OLMoE: multi-head attention with norms over all queries and over all keys, RoPE, and in every layer
SwiGLU experts with softmax top-k routing whose weights are not renormalised.

Source: `OlmoeForCausalLM` of transformers and "OLMoE" (arXiv 2409.02060).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.architectures.qwen3_moe import num_experts
from parallel.dims import ModelSizes


def sizes(hf: HfConfig) -> ModelSizes:
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=common.query_groups(hf),
        vocab_size=hf["vocab_size"],
        dense_ffn_size=0,
        num_experts=num_experts(hf),
        moe_ffn_size=hf["intermediate_size"],
    )


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    clip, width = hf.get("clip_qkv"), hf["num_attention_heads"] * common.head_dim(hf)
    common.refuse_unsupported(hf)
    common.refuse_constant_gate(hf, "norm_topk_prob")
    common.refuse(
        hf,
        (
            (
                clip is not None,
                f"clip_qkv {clip} is not supported, because neither Megatron nor SGLang clips queries, "
                "keys and values; set it to null if the model was trained without",
            ),
            (
                width != hf["hidden_size"],
                f"{hf['num_attention_heads']} heads of {common.head_dim(hf)} are {width} columns, but "
                f"the norm of the queries has hidden_size {hf['hidden_size']}; they must be equal",
            ),
        ),
    )
    return {
        **common.decoder_config(hf, common.every_layer(hf)),
        **common.grouped_query_config(hf),
        "qk_layernorm": True,
        "num_moe_experts": num_experts(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_pre_softmax": not hf["norm_topk_prob"],  # as in qwen3_moe
    }


def rules(hf: HfConfig) -> list[Rule]:
    hf_mlp = f"{common.HF_LAYER}.mlp"
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(norms=True),
        Rule(f"{common.LAYER}.mlp.router.weight", (f"{hf_mlp}.gate.weight",)),
        *common.mlp_rules(common.EXPERT, f"{hf_mlp}.experts.{{expert}}"),
    ]


ARCHITECTURE = Architecture(
    model_type="olmoe",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=common.every_layer,
    norms_whole_projections=True,
)
