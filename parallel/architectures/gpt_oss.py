"""gpt-oss: GQA with biases and attention sinks, windows in every second layer, YaRN, and in every layer
clamped SwiGLU experts with biases behind a softmax top-k router with a bias.

A sink is a learned logit per head in the denominator of the softmax: it takes attention, and has no
value. An expert computes `(min(g, 7) sigmoid(1.702 min(g, 7))) (clamp(u, -7, 7) + 1)` from its gate g
and up projection u.

Source: `GptOssForCausalLM` of transformers and the model card of gpt-oss (arXiv 2508.10925).
"""

from __future__ import annotations

import math
from typing import Any

from parallel.architectures import common
from parallel.architectures.base import Architecture, HfConfig, Rule, Stacked
from parallel.architectures.common import ATTENTION, EXPERT, HF_ATTENTION
from parallel.dims import ModelSizes

ALPHA = 1.702
"""The gain of the gate's sigmoid. Megatron's `quick_gelu` has no other."""
WINDOWED, FULL = "sliding_attention", "full_attention"
HF_MLP = f"{common.HF_LAYER}.mlp"
HF_EXPERT = f"{HF_MLP}.experts.{{expert}}"


def sizes(hf: HfConfig) -> ModelSizes:
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=common.query_groups(hf),
        vocab_size=hf["vocab_size"],
        dense_ffn_size=0,
        num_experts=hf["num_local_experts"],
        moe_ffn_size=hf["intermediate_size"],
        experts_have_bias=True,
    )


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    common.refuse_unsupported(
        {key: value for key, value in hf.items() if key != "layer_types"},
        ("default", "yarn"),
        attention_bias=True,
    )
    common.refuse_constant_gate(hf)
    _refuse_others(hf)
    windows = [int(kind == WINDOWED) for kind in layer_types(hf)]
    return {
        **common.decoder_config(hf, common.every_layer(hf)),
        **common.grouped_query_config(hf),
        **_rope(hf),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (hf["sliding_window"] - 1, 0) if any(windows) else None,
        "window_attn_skip_freq": windows if any(windows) else None,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": float(hf.get("swiglu_limit", 7.0)),
        "glu_linear_offset": 1.0,
        "num_moe_experts": hf["num_local_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "moe_router_pre_softmax": False,
    }


def layer_types(hf: HfConfig) -> list[str]:
    """Return the type of each layer. By default the layers with odd numbers, from 1, have windows."""
    default = [FULL if n % 2 else WINDOWED for n in range(hf["num_hidden_layers"])]
    return hf.get("layer_types") or default


def _refuse_others(hf: HfConfig) -> None:
    types, window = layer_types(hf), hf.get("sliding_window")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    alpha, limit = hf.get("swiglu_alpha", ALPHA), hf.get("swiglu_limit", 7.0)
    other = sorted(set(types) - {WINDOWED, FULL})
    common.refuse(
        hf,
        (
            (
                not hf.get("attention_bias", True),
                "attention_bias false is not supported, because Megatron has biases in all linear "
                "layers or in none",
            ),
            (
                other or len(types) != hf["num_hidden_layers"],
                f"layer_types has {len(types)} entries, among them {other or types[:1]}; expected "
                f"{hf['num_hidden_layers']} of {WINDOWED} and {FULL}",
            ),
            (
                WINDOWED in types and (not isinstance(window, int) or window < 1),
                f"sliding_window {window!r} with layers of {WINDOWED}; expected a positive number",
            ),
            (
                not rope.keys() & {"rope_type", "type"},
                "its RoPE settings have no rope_type, and transformers would take YaRN with a factor "
                "of 32; write them (rope_type: default for plain RoPE)",
            ),
            (alpha != ALPHA, f"swiglu_alpha {alpha} is not supported, only {ALPHA}"),
            (
                not isinstance(limit, int | float) or not 0 < limit < math.inf,
                f"swiglu_limit {limit!r:.30}; expected a positive finite number",
            ),
            (
                hf.get("tie_word_embeddings"),
                "tie_word_embeddings is not supported; set it to false",
            ),
        ),
    )


def _rope(hf: HfConfig) -> dict[str, Any]:
    """Return Megatron's settings for YaRN (arXiv 2309.00071); none for plain RoPE.

    Cosines and sines are scaled by `0.1 ln(factor) + 1`, and the softmax is not.
    """
    rope = common.rope_settings(hf)
    if rope["rope_type"] == "default":
        return {}
    common.refuse(
        hf,
        (
            (
                any(rope.get(key) for key in ("mscale", "mscale_all_dim", "attention_factor")),
                "YaRN with mscale, mscale_all_dim or attention_factor is not supported; remove them",
            ),
            (
                not rope.get("factor") or not rope.get("original_max_position_embeddings"),
                "YaRN needs its factor and original_max_position_embeddings; write them into the RoPE "
                "settings",
            ),
        ),
    )
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def rules(hf: HfConfig) -> list[Rule]:
    router = f"{common.LAYER}.mlp.router"
    biases = (f"{HF_EXPERT}.gate_proj.bias", f"{HF_EXPERT}.up_proj.bias")
    return [
        *common.decoder_rules(hf),
        *common.grouped_query_rules(bias=True),
        Rule(f"{ATTENTION}.linear_proj.bias", (f"{HF_ATTENTION}.o_proj.bias",)),
        Rule(f"{ATTENTION}.core_attention.softmax_offset", (f"{HF_ATTENTION}.sinks",), "rows"),
        Rule(f"{router}.weight", (f"{HF_MLP}.router.weight",)),
        Rule(f"{router}.bias", (f"{HF_MLP}.router.bias",)),
        *common.mlp_rules(EXPERT, HF_EXPERT),
        Rule(f"{EXPERT}.linear_fc1.bias", biases, "gated"),
        Rule(f"{EXPERT}.linear_fc2.bias", (f"{HF_EXPERT}.down_proj.bias",)),
    ]


def _stacked(name: str, parts: tuple[str, ...], kind: str) -> Stacked:
    """Return the tensor `name` of all experts. `kind` is weight or bias."""
    suffix = "" if kind == "weight" else "_bias"
    stored = f"{HF_MLP}.experts.{name}{suffix}"
    return Stacked(stored, tuple(f"{HF_EXPERT}.{part}.{kind}" for part in parts))


ARCHITECTURE = Architecture(
    model_type="gpt_oss",
    sizes=sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=common.every_layer,
    stacked=tuple(
        _stacked(name, parts, kind)
        for name, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        )
        for kind in ("weight", "bias")
    ),
    needs_native="its attention sinks, windows and expert biases were not tried in others",
)
