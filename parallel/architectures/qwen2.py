"""The dense models Qwen2 and Qwen2.5: GQA with query/key/value biases, RoPE, SwiGLU, RMSNorm.

Source: `Qwen2ForCausalLM` of transformers and the Qwen2 technical report (arXiv 2407.10671).
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
        "add_qkv_bias": True,
    }


def rules(hf: HfConfig) -> list[Rule]:
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(bias=True),
        *common.mlp_rules(f"{common.LAYER}.mlp", f"{common.HF_LAYER}.mlp"),
    ]


ARCHITECTURE = Architecture(
    model_type="qwen2",
    sizes=common.dense_sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=common.no_moe_layers,
)
