"""Mixtral: GQA, RoPE, and in every layer SwiGLU experts with renormalised softmax routing.

Source: `MixtralForCausalLM` of transformers and "Mixtral of Experts" (arXiv 2401.04088).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.dims import ModelSizes


def sizes(hf: HfConfig) -> ModelSizes:
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=common.query_groups(hf),
        vocab_size=hf["vocab_size"],
        dense_ffn_size=0,
        num_experts=hf["num_local_experts"],
        moe_ffn_size=hf["intermediate_size"],
    )


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    window, context, jitter = (
        hf.get("sliding_window"),
        hf["max_position_embeddings"],
        hf.get("router_jitter_noise"),
    )
    _refuse_rope(hf)
    common.refuse_unsupported(hf)
    common.refuse_constant_gate(hf)
    common.refuse(
        hf,
        (
            (
                window and window < context,
                f"sliding_window {window} is shorter than max_position_embeddings {context}, and "
                "only full attention is supported; set it to null if the model was trained without",
            ),
            (jitter, f"router_jitter_noise {jitter} is not supported; set it to 0.0"),
        ),
    )
    return {
        **common.decoder_config(hf, common.every_layer(hf)),
        **common.grouped_query_config(hf),
        "num_moe_experts": hf["num_local_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_pre_softmax": False,  # a softmax over the chosen experts equals renormalising
    }


def _refuse_rope(hf: HfConfig) -> None:
    """Raise InputError for RoPE settings that SGLang's Mixtral leaves out or rounds."""
    rope = common.rope_settings(hf)
    kind, theta = rope["rope_type"], rope["rope_theta"]
    common.refuse(
        hf,
        (
            (
                kind != "default",
                f"RoPE type {kind!r} is not supported, only default, because SGLang's Mixtral ignores "
                "it",
            ),
            (
                theta % 1,
                f"rope_theta {theta} is not supported, only whole numbers, because SGLang's Mixtral "
                "rounds it down",
            ),
        ),
    )


def rules(hf: HfConfig) -> list[Rule]:
    hf_moe = f"{common.HF_LAYER}.block_sparse_moe"
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(),
        Rule(f"{common.LAYER}.mlp.router.weight", (f"{hf_moe}.gate.weight",)),
        *common.mlp_rules(common.EXPERT, f"{hf_moe}.experts.{{expert}}", ("w1", "w3", "w2")),
    ]


ARCHITECTURE = Architecture(
    model_type="mixtral",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=common.every_layer,
)
