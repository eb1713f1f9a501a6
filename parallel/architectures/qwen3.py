"""Qwen3, the dense model: GQA with query/key norms, RoPE, SwiGLU, RMSNorm.

Source: `Qwen3ForCausalLM` of transformers and the Qwen3 technical report (arXiv 2505.09388).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    common.refuse_unsupported(hf)
    return {
        **common.decoder_config(hf, ()),
        **common.grouped_query_config(hf),
        "kv_channels": hf["head_dim"],  # transformers has a fixed default, not hidden / heads
        "qk_layernorm": True,
    }


def rules(hf: HfConfig) -> list[Rule]:
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(norms=True),
        *common.mlp_rules(f"{common.LAYER}.mlp", f"{common.HF_LAYER}.mlp"),
    ]


ARCHITECTURE = Architecture(
    model_type="qwen3",
    sizes=common.dense_sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=common.no_moe_layers,
)
