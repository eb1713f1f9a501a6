"""Qwen3-MoE: GQA with query/key norms, RoPE, SwiGLU, RMSNorm, softmax top-k routing.

Source: `Qwen3MoeForCausalLM` of transformers and the Qwen3 technical report (arXiv 2505.09388).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.dims import ModelSizes


def num_experts(hf: HfConfig) -> int:
    """Return the number of experts. transformers 5 writes it as `num_local_experts`, transformers 4
    as `num_experts`."""
    return hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"]


def moe_layer_numbers(hf: HfConfig) -> tuple[int, ...]:
    return common.sparse_layers(hf, num_experts(hf))


def sizes(hf: HfConfig) -> ModelSizes:
    has_dense = len(moe_layer_numbers(hf)) < hf["num_hidden_layers"]
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=common.query_groups(hf),
        vocab_size=hf["vocab_size"],
        dense_ffn_size=hf["intermediate_size"] if has_dense else 0,
        num_experts=num_experts(hf),
        moe_ffn_size=hf["moe_intermediate_size"],
    )


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    common.refuse_unsupported(hf)
    common.refuse_constant_gate(hf, "norm_topk_prob")
    return {
        **common.decoder_config(hf, moe_layer_numbers(hf)),
        **common.grouped_query_config(hf),
        "qk_layernorm": True,
        "num_moe_experts": num_experts(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        # With norm_topk_prob the softmax is over the chosen experts only, which equals renormalising
        # the chosen weights of a softmax over all experts; without it, the softmax is over all.
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
    }


def rules(hf: HfConfig) -> list[Rule]:
    hf_mlp = f"{common.HF_LAYER}.mlp"
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(norms=True),
        Rule(f"{common.LAYER}.mlp.router.weight", (f"{hf_mlp}.gate.weight",)),
        *common.mlp_rules(common.EXPERT, f"{hf_mlp}.experts.{{expert}}"),
        *common.mlp_rules(f"{common.LAYER}.mlp", hf_mlp),
    ]


ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=moe_layer_numbers,
)
