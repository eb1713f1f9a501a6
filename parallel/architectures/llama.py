"""Llama 2 and 3, SmolLM2 and other models of that form: GQA, RoPE, SwiGLU, RMSNorm, no biases.

Source: `LlamaForCausalLM` of transformers, and the papers of Llama 2 (arXiv 2307.09288) and Llama 3
(arXiv 2407.21783). Llama 3.1 and later scale RoPE for longer contexts (`rope_type` llama3).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    common.refuse_unsupported(hf)
    common.refuse(
        hf, ((hf.get("mlp_bias"), "mlp_bias is not supported; use a model without biases"),)
    )
    return {**common.decoder_config(hf, ()), **common.grouped_query_config(hf)}


def rules(hf: HfConfig) -> list[Rule]:
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(),
        *common.mlp_rules(f"{common.LAYER}.mlp", f"{common.HF_LAYER}.mlp"),
    ]


ARCHITECTURE = Architecture(
    model_type="llama",
    sizes=common.dense_sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=common.no_moe_layers,
)
