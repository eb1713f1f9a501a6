"""DeepSeek-V3 and R1: latent attention (MLA), a shared expert, sigmoid routing in groups of experts.

A bias that affects only the choice of experts balances their load.

Gate weights (arXiv 2412.19437 eq. 12 to 16): `s = sigmoid(router logits)`. From the
scores `s + e_score_correction_bias`, the router first chooses groups of experts, then the experts in
these groups. The gate weights are the `s` of the chosen experts, divided by the sum of these `s` and
multiplied by `routed_scaling_factor`. Routing replay replaces only the choice.

Source: `DeepseekV3ForCausalLM` of transformers. The multi-token-prediction layers
(num_nextn_predict_layers) are not part of that class: mrl does not read, train or export them.
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule
from parallel.architectures.common import ATTENTION, HF_ATTENTION
from parallel.dims import ModelSizes

LATENT_NORM_EPS = 1e-6
"""The epsilon that transformers uses for the latents' norms, regardless of rms_norm_eps. Megatron has
one epsilon for all norms, so a model with another rms_norm_eps is refused."""
SCORED_EXPERTS = 2
"""A group's score is the sum of its SCORED_EXPERTS highest expert scores (arXiv 2412.19437 section
2.1.2)."""


def moe_layer_numbers(hf: HfConfig) -> tuple[int, ...]:
    return tuple(range(hf["first_k_dense_replace"] + 1, hf["num_hidden_layers"] + 1))


def sizes(hf: HfConfig) -> ModelSizes:
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_attention_heads"],  # every head has its own keys and values
        vocab_size=hf["vocab_size"],
        dense_ffn_size=hf["intermediate_size"] if hf["first_k_dense_replace"] else 0,
        num_experts=hf["n_routed_experts"],
        moe_ffn_size=hf["moe_intermediate_size"],
        shared_expert_ffn_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
    )


def unread(hf: HfConfig) -> dict[str, str]:
    """Return the tensors that are not read: those of the multi-token-prediction layers, which come
    after all other layers."""
    count, first = hf.get("num_nextn_predict_layers") or 0, hf["num_hidden_layers"]
    return {
        f"model.layers.{first + n}.": "a multi-token-prediction layer is neither trained nor exported"
        for n in range(count)
    }


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    common.refuse_unsupported(hf, ("default", "yarn"))
    _refuse_other_layers(hf)
    _refuse_other_routing(hf)
    return {
        **common.decoder_config(hf, moe_layer_numbers(hf)),
        **_latent_attention(hf),
        **_rope(hf),
        "num_moe_experts": hf["n_routed_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_num_groups": hf["n_group"] if _limits_groups(hf) else None,
        "moe_router_group_topk": hf["topk_group"] if _limits_groups(hf) else None,
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


def _limits_groups(hf: HfConfig) -> bool:
    return hf["topk_group"] < hf["n_group"]


def _refuse_other_layers(hf: HfConfig) -> None:
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
            (hf.get("moe_layer_freq", 1) != 1, "moe_layer_freq is not supported, only 1"),
            (
                not hf["n_shared_experts"],
                "n_shared_experts must be 1 or more; models without a shared expert are not supported",
            ),
            (
                hf["first_k_dense_replace"] >= hf["num_hidden_layers"],
                "first_k_dense_replace leaves no MoE layer; models without experts are not supported",
            ),
        ),
    )


def _refuse_other_routing(hf: HfConfig) -> None:
    topk, groups, kept = hf["num_experts_per_tok"], hf["n_group"], hf["topk_group"]
    experts, scoring = hf["n_routed_experts"], hf.get("scoring_func", "sigmoid")
    method = hf.get("topk_method", "noaux_tc")
    common.refuse(
        hf,
        (
            (scoring != "sigmoid", f"scoring_func {scoring!r} is not supported, only 'sigmoid'"),
            (method != "noaux_tc", f"topk_method {method!r} is not supported, only 'noaux_tc'"),
            (
                hf["norm_topk_prob"] != (topk > 1),
                f"norm_topk_prob {str(hf['norm_topk_prob']).lower()} with {topk} expert(s) per token "
                "is not supported: Megatron's sigmoid router normalises exactly when it takes more "
                "than one",
            ),
            (not hf["routed_scaling_factor"], "routed_scaling_factor must not be 0; use 1.0"),
            (
                not groups or not kept or experts % groups,
                f"{experts} experts cannot be divided into n_group {groups} with topk_group "
                f"{kept}; use a divisor, or 1 and 1 for no groups",
            ),
        ),
    )
    scored = topk // kept
    common.refuse(
        hf,
        (
            (
                _limits_groups(hf) and scored != SCORED_EXPERTS,
                f"{topk} experts of {kept} groups per token: Megatron would score a group by its best "
                f"{topk} // {kept} = {scored} experts, the model by its best {SCORED_EXPERTS}; only "
                "combinations where the two agree are supported",
            ),
        ),
    )


def rules(hf: HfConfig) -> list[Rule]:
    mlp, hf_mlp = f"{common.LAYER}.mlp", f"{common.HF_LAYER}.mlp"
    bias = f"{hf_mlp}.gate.e_score_correction_bias"
    return [
        *common.decoder_rules(hf),
        *_attention_rules(),
        Rule(f"{mlp}.router.weight", (f"{hf_mlp}.gate.weight",)),
        Rule(f"{mlp}.router.expert_bias", (bias,), is_buffer=True),
        *common.mlp_rules(common.EXPERT, f"{hf_mlp}.experts.{{expert}}"),
        *common.mlp_rules(common.SHARED_EXPERT, f"{hf_mlp}.shared_experts"),
        *common.mlp_rules(mlp, hf_mlp),
    ]


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
    moe_layer_numbers=moe_layer_numbers,
    unread=unread,
)
