"""DeepSeek-V3 and R1: latent attention (MLA), dense layers first, then MoE layers with a shared expert
and a sigmoid router (`parallel.architectures.deepseek_moe`).

Source: `DeepseekV3ForCausalLM` of transformers and the report of DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common, deepseek_moe
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.architectures.common import ATTENTION, HF_ATTENTION
from parallel.dims import ModelSizes

LATENT_NORM_EPS = 1e-6
"""The epsilon that transformers uses for the latents' norms, regardless of rms_norm_eps. Megatron has
one epsilon for all norms, so a model with another rms_norm_eps is refused."""


def sizes(hf: HfConfig) -> ModelSizes:
    # Every head has its own keys and values.
    return deepseek_moe.moe_sizes(hf, num_query_groups=hf["num_attention_heads"])


def transformer_config(
    hf: HfConfig, layer_types: tuple[str, ...] = ("full_attention",)
) -> dict[str, Any]:
    """Return Megatron's settings. `layer_types` are the kinds of layers that config.json may name."""
    common.refuse_unsupported(hf, ("default", "yarn"), layer_types=layer_types)
    _refuse_other_attention(hf)
    return {
        **common.decoder_config(hf, deepseek_moe.moe_layer_numbers(hf)),
        **_latent_attention(hf),
        **_rope(hf),
        **deepseek_moe.moe_config(hf),
    }


def _latent_attention(hf: HfConfig) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "num_query_groups": hf["num_attention_heads"],
        "kv_channels": hf["v_head_dim"],
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
    }


def _rope(hf: HfConfig) -> dict[str, Any]:
    """Return Megatron's settings for RoPE, plain or YaRN (arXiv 2309.00071).

    YaRN scales cosines and sines by `m(mscale) / m(mscale_all_dim)`, and the softmax by
    `m(mscale_all_dim) ** 2`, with `m(x) = 0.1 * x * ln(factor) + 1`. If config.json has neither
    `mscale` nor `mscale_all_dim`, transformers scales cosines and sines by `m(1)` and the
    softmax by 1. Megatron does the same with mscale 1 and mscale_all_dim 0.
    """
    rope = common.rope_settings(hf)
    if rope["rope_type"] == "default":
        return {
            "rope_type": "rope",
            "rotary_base": rope["rope_theta"],
            "rotary_scaling_factor": 1.0,
            "mscale_all_dim": 0.0,
        }
    common.refuse(
        hf,
        (
            (
                bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")),
                "YaRN with only one of mscale and mscale_all_dim is not supported; give both or none",
            ),
            (rope.get("attention_factor"), "YaRN's attention_factor is not supported; remove it"),
            (rope.get("truncate") is False, "YaRN with truncate false is not supported"),
            (not rope.get("factor"), "YaRN needs its factor; write it into the RoPE settings"),
        ),
    )
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", hf["max_position_embeddings"]
        ),
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _refuse_other_attention(hf: HfConfig) -> None:
    eps, heads, kv_heads = hf["rms_norm_eps"], hf["num_attention_heads"], common.query_groups(hf)
    common.refuse(
        hf,
        (
            (
                eps != LATENT_NORM_EPS,
                f"rms_norm_eps {eps} is not supported, only {LATENT_NORM_EPS}: the norms of the "
                "latents always use that, and Megatron has one epsilon for all norms",
            ),
            (
                not hf.get("rope_interleave", True),
                "rope_interleave false is not supported, only interleaved rotary dimensions",
            ),
            (
                kv_heads != heads,
                f"num_key_value_heads {kv_heads} must equal num_attention_heads {heads}",
            ),
        ),
    )


def rules(hf: HfConfig) -> list[Rule]:
    return [*common.decoder_rules(hf), *_attention_rules(), *deepseek_moe.moe_rules()]


def _attention_rules() -> list[Rule]:
    """Return the rules of latent attention. A rule names the HF tensors of a Megatron parameter.

    Queries come from a latent (q_down, norm, q_up) or, without q_lora_rank, directly from q_proj.
    """

    def rule(megatron: str, hf: str, split: Any = "none") -> Rule:
        return Rule(f"{ATTENTION}.{megatron}.weight", (f"{HF_ATTENTION}.{hf}.weight",), split)

    return [
        rule("linear_q_proj", "q_proj", "rows"),
        rule("linear_q_down_proj", "q_a_proj"),
        rule("q_layernorm", "q_a_layernorm"),
        rule("linear_q_up_proj", "q_b_proj", "rows"),
        rule("linear_kv_down_proj", "kv_a_proj_with_mqa"),
        rule("kv_layernorm", "kv_a_layernorm"),
        rule("linear_kv_up_proj", "kv_b_proj", "rows"),
        rule("linear_proj", "o_proj", "columns"),
    ]


ARCHITECTURE = Architecture(
    model_type="deepseek_v3",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=deepseek_moe.moe_layer_numbers,
    unread=deepseek_moe.unread,
    mtp=deepseek_moe.mtp_layers(rules),
)
