"""GLM-4.5: GQA with biases and, in some models, norms of queries and keys; RoPE on a part of each head;
dense layers first, then MoE layers as in DeepSeek-V3 (`parallel.architectures.deepseek_moe`).

Source: `Glm4MoeForCausalLM` of transformers and "GLM-4.5" (arXiv 2508.06471).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common, deepseek_moe
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.dims import ModelSizes


def sizes(hf: HfConfig) -> ModelSizes:
    return deepseek_moe.moe_sizes(hf, num_query_groups=common.query_groups(hf))


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    # The biases are those of query, key and value; the output projection has none.
    common.refuse_unsupported(hf, attention_bias=True, partial_rotary=True)
    fraction = common.rotary_fraction(hf)
    rotated = int(common.head_dim(hf) * fraction)
    common.refuse(
        hf,
        (
            (
                common.given_rotary_fraction(hf) is None,
                "there is no partial_rotary_factor; write it, 0.5 in GLM-4.5",
            ),
            (
                not 0 < fraction <= 1 or rotated < 2 or rotated % 2,
                f"partial_rotary_factor {fraction} of head_dim {common.head_dim(hf)} rotates {rotated} "
                "dimensions; expected an even number above 0",
            ),
        ),
    )
    return {
        **common.decoder_config(hf, deepseek_moe.moe_layer_numbers(hf)),
        **common.grouped_query_config(hf),
        "add_qkv_bias": has_bias(hf),
        "qk_layernorm": has_norms(hf),
        **deepseek_moe.moe_config(hf),
    }


def has_bias(hf: HfConfig) -> bool:
    """Return whether query, key and value have biases."""
    return bool(hf.get("attention_bias"))


def has_norms(hf: HfConfig) -> bool:
    """Return whether each head of queries and keys is normalised."""
    return bool(hf.get("use_qk_norm"))


def rules(hf: HfConfig) -> list[Rule]:
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(norms=has_norms(hf), bias=has_bias(hf)),
        *deepseek_moe.moe_rules(),
    ]


ARCHITECTURE = Architecture(
    model_type="glm4_moe",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=deepseek_moe.moe_layer_numbers,
    unread=deepseek_moe.unread,
    mtp=deepseek_moe.mtp_layers(rules),
)
