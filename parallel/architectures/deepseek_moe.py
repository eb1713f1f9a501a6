"""The MoE layers of DeepSeek-V3, which GLM-4.5 has, too.

The first layers are dense. In the others a token goes to shared experts, and to experts that a sigmoid
router chooses in groups of experts. A bias that affects only the choice of experts balances their load.

Gate weights (arXiv 2412.19437 eq. 12 to 16): `s = sigmoid(router logits)`. From the
scores `s + e_score_correction_bias`, the router first chooses groups of experts, then the experts in
these groups. The gate weights are the `s` of the chosen experts, divided by the sum of these `s` and
multiplied by `routed_scaling_factor`. Routing replay replaces only the choice.

The multi-token-prediction layers (num_nextn_predict_layers) are not part of the classes of
transformers. Unless the recipe trains them (`train.mtp_loss_scaling_factor`), mrl does not load them,
and `mrl export` copies them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel.architectures import common
from parallel.architectures.base import HfConfig, MtpLayers, Rule
from parallel.architectures.mtp import mtp_rules
from parallel.dims import ModelSizes

SCORED_EXPERTS = 2
"""A group's score is the sum of its SCORED_EXPERTS highest expert scores (arXiv 2412.19437 section
2.1.2)."""


def moe_layer_numbers(hf: HfConfig) -> tuple[int, ...]:
    return tuple(range(hf["first_k_dense_replace"] + 1, hf["num_hidden_layers"] + 1))


def moe_sizes(hf: HfConfig, num_query_groups: int) -> ModelSizes:
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=num_query_groups,
        vocab_size=hf["vocab_size"],
        dense_ffn_size=hf["intermediate_size"] if hf["first_k_dense_replace"] else 0,
        num_experts=hf["n_routed_experts"],
        moe_ffn_size=hf["moe_intermediate_size"],
        shared_expert_ffn_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
    )


def unread(hf: HfConfig) -> dict[str, str]:
    """Return the tensors that are not read: those of the multi-token-prediction layers, which come
    after all other layers."""
    text = "a multi-token-prediction layer is not trained, and exported as it is"
    return {f"model.layers.{layer}.": text for layer in _mtp_indices(hf)}


def _mtp_indices(hf: HfConfig) -> tuple[int, ...]:
    first = hf["num_hidden_layers"]
    return tuple(range(first, first + (hf.get("num_nextn_predict_layers") or 0)))


def mtp_layers(rules: Callable[[HfConfig], list[Rule]]) -> MtpLayers:
    """Return the multi-token-prediction layers of an architecture with these `rules`. Checkpoints
    repeat embedding and output layer in each of them."""
    layer = common.HF_LAYER
    own = {name: f"{layer}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
    own["final_layernorm"] = f"{layer}.shared_head.norm.weight"

    def copies(hf: HfConfig) -> dict[str, str]:
        embedding = "model.embed_tokens.weight"
        head = embedding if hf.get("tie_word_embeddings") else "lm_head.weight"
        both = (("embed_tokens.weight", embedding), ("shared_head.head.weight", head))
        return {f"model.layers.{n}.{name}": of for n in _mtp_indices(hf) for name, of in both}

    return MtpLayers(
        num=lambda hf: len(_mtp_indices(hf)),
        rules=lambda hf: mtp_rules(rules(hf), _mtp_indices(hf), own),
        copies=copies,
    )


def moe_config(hf: HfConfig) -> dict[str, Any]:
    """Return Megatron's settings for the MoE layers. Raises InputError for layers or a routing that
    Megatron would compute in another way."""
    _refuse_other_layers(hf)
    _refuse_other_routing(hf)
    return {
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


def _limits_groups(hf: HfConfig) -> bool:
    return hf["topk_group"] < hf["n_group"]


def _refuse_other_layers(hf: HfConfig) -> None:
    common.refuse(
        hf,
        (
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


def moe_rules() -> list[Rule]:
    """Return the rules of the dense and the MoE layers, without attention and norms."""
    mlp, hf_mlp = f"{common.LAYER}.mlp", f"{common.HF_LAYER}.mlp"
    bias = f"{hf_mlp}.gate.e_score_correction_bias"
    return [
        Rule(f"{mlp}.router.weight", (f"{hf_mlp}.gate.weight",)),
        Rule(f"{mlp}.router.expert_bias", (bias,), is_buffer=True),
        *common.mlp_rules(common.EXPERT, f"{hf_mlp}.experts.{{expert}}"),
        *common.mlp_rules(common.SHARED_EXPERT, f"{hf_mlp}.shared_experts"),
        *common.mlp_rules(mlp, hf_mlp),
    ]
