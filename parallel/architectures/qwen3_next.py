"""Qwen3-Next: three of four layers are gated delta nets (`parallel.layers.gated_delta_net`). The others
have GQA with query/key norms, RoPE on a part of each head, and an output gate. Norms multiply by their
weight + 1. Softmax top-k routing, and a shared expert with a gate.

Source: `Qwen3NextForCausalLM` of transformers. It keeps the rows of a key head together (its query,
key, values and gates) in the projections of the delta nets, and so does Megatron's parameter here:
tensor-parallel ranks have a part of the key heads each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, MtpLayers, Rule, Split
from parallel.architectures.mtp import mtp_rules
from parallel.architectures.qwen3_moe import moe_layer_numbers, num_experts
from parallel.dims import ModelSizes

LINEAR, FULL = "linear_attention", "full_attention"
GATES = ("silu", "swish")
"""Values of `output_gate_type` under which the delta nets' output gate is a SiLU."""
HF_DELTA = f"{common.HF_LAYER}.linear_attn"


def layer_types(hf: HfConfig) -> list[str]:
    """Return the kind of attention of each layer. Without `layer_types`, every layer whose 1-based
    number is a multiple of `full_attention_interval` (4) has full attention."""
    interval = hf.get("full_attention_interval") or 4
    given = hf.get("layer_types")
    return given or [
        LINEAR if (number + 1) % interval else FULL for number in range(hf["num_hidden_layers"])
    ]


def layers_of(hf: HfConfig, kind: str) -> tuple[int, ...]:
    """Return the 0-based indices of the layers with this kind of attention."""
    return tuple(number for number, each in enumerate(layer_types(hf)) if each == kind)


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
        shared_expert_ffn_size=hf["shared_expert_intermediate_size"],
        linear_key_heads=hf["linear_num_key_heads"],
    )


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    common.refuse_unsupported(hf, partial_rotary=True, layer_types=(LINEAR, FULL))
    common.refuse_constant_gate(hf, "norm_topk_prob")
    _refuse_other_attention(hf)
    return {
        **common.decoder_config(hf, moe_layer_numbers(hf)),
        **common.grouped_query_config(hf),
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == LINEAR) for kind in layer_types(hf)],
        **{
            f"linear_{key}": hf[f"linear_{key}"]
            for key in (
                *("conv_kernel_dim", "key_head_dim", "value_head_dim"),
                *("num_key_heads", "num_value_heads"),
            )
        },
        "num_moe_experts": num_experts(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_pre_softmax": not hf["norm_topk_prob"],  # as in qwen3_moe
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def _refuse_other_attention(hf: HfConfig) -> None:
    fraction, kinds = common.given_rotary_fraction(hf), layer_types(hf)
    rotated = int(common.head_dim(hf) * (fraction or 0))
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    gate = hf.get("output_gate_type") or "silu"
    common.refuse(
        hf,
        (
            (fraction is None, "there is no partial_rotary_factor; write it, 0.25 in Qwen3-Next"),
            (
                fraction is not None and (not 0 < fraction <= 1 or rotated < 2 or rotated % 2),
                f"partial_rotary_factor {fraction} of head_dim {common.head_dim(hf)} rotates {rotated} "
                "dimensions; expected an even number above 0",
            ),
            (
                len(kinds) != hf["num_hidden_layers"],
                f"layer_types has {len(kinds)} entries, expected num_hidden_layers "
                f"{hf['num_hidden_layers']}",
            ),
            (
                not moe_layer_numbers(hf),
                "no layer has experts; models without experts are not supported",
            ),
            (
                values % keys,
                f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}",
            ),
            (
                not hf.get("attn_output_gate", True),
                "attn_output_gate false is not supported, only attention with an output gate",
            ),
            (gate not in GATES, f"output_gate_type {gate!r} is not supported, only 'silu'"),
        ),
    )


def rules(hf: HfConfig) -> list[Rule]:
    mlp, hf_mlp = f"{common.LAYER}.mlp", f"{common.HF_LAYER}.mlp"
    return [
        *common.decoder_rules(hf),
        *_full_attention_rules(layers_of(hf, FULL)),
        *_delta_net_rules(layers_of(hf, LINEAR)),
        Rule(f"{mlp}.router.weight", (f"{hf_mlp}.gate.weight",)),
        *common.mlp_rules(common.EXPERT, f"{hf_mlp}.experts.{{expert}}"),
        *common.mlp_rules(common.SHARED_EXPERT, f"{hf_mlp}.shared_expert"),
        Rule(f"{common.SHARED_EXPERT}.gate_weight", (f"{hf_mlp}.shared_expert_gate.weight",)),
        *common.mlp_rules(mlp, hf_mlp),
    ]


def _full_attention_rules(layers: tuple[int, ...]) -> list[Rule]:
    """Return the rules of grouped-query attention in `layers`. The HF tensor of the queries also has
    the rows of the output gates."""
    return [
        replace(rule, layers=layers, split="gated_qkv" if rule.split == "qkv" else rule.split)
        for rule in common.grouped_query_rules(norms=True)
    ]


def _delta_net_rules(layers: tuple[int, ...]) -> list[Rule]:
    """Return the rules of the gated delta nets in `layers`."""
    table: tuple[tuple[str, str, Split], ...] = (
        ("linear_qkvz.weight", "in_proj_qkvz.weight", "rows"),
        ("linear_ba.weight", "in_proj_ba.weight", "none"),
        ("linear_out.weight", "out_proj.weight", "columns"),
        ("conv_weight", "conv1d.weight", "none"),
        ("dt_bias", "dt_bias", "none"),
        ("A_log", "A_log", "none"),
        ("norm_weight", "norm.weight", "none"),
    )
    return [
        Rule(f"{common.ATTENTION}.{megatron}", (f"{HF_DELTA}.{hf}",), split, layers=layers)
        for megatron, hf, split in table
    ]


def unread(hf: HfConfig) -> dict[str, str]:
    """Return the tensors that are not read: those of the multi-token-prediction layers. config.json
    does not say whether there are any."""
    return {"mtp.": "a multi-token-prediction layer (mtp.*) is not trained, and exported as it is"}


def _mtp_rules(hf: HfConfig) -> list[Rule]:
    """Return the rules of the one multi-token-prediction layer, which has full attention."""
    own = {
        "enorm": "mtp.pre_fc_norm_embedding.weight",
        "hnorm": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj": "mtp.fc.weight",
        "final_layernorm": "mtp.norm.weight",
    }
    full = [rule for rule in rules(hf) if not rule.hf[0].startswith(HF_DELTA)]
    return mtp_rules(full, (hf["num_hidden_layers"],), own, hf_layer="mtp.layers.0")


ARCHITECTURE = Architecture(
    model_type="qwen3_next",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=moe_layer_numbers,
    unread=unread,
    mtp=MtpLayers(num=lambda hf: 1, rules=_mtp_rules),
    needs_native="Megatron's gated delta nets refuse packed sequences",
)
