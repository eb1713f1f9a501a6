"""Code that the architectures share: settings, rows of the rule table, and checks of config.json.

A setting that transformers and Megatron would not compute in the same way is refused here or in the
architecture's own file, because a silent difference is the worst outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mrl.errors import InputError
from parallel.architectures.base import HfConfig, Rule
from parallel.dims import ModelSizes

LAYER, HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
ATTENTION, HF_ATTENTION = f"{LAYER}.self_attention", f"{HF_LAYER}.self_attn"
EXPERT = f"{LAYER}.mlp.experts.local_experts.{{expert}}"
SHARED_EXPERT = f"{LAYER}.mlp.shared_experts"
LLAMA3 = "llama3"
"""The RoPE type of Llama 3.1 and later."""
ROPE_TYPES = ("default", LLAMA3)
"""The RoPE types that Megatron's grouped-query attention computes as transformers and SGLang do."""
LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The settings of RoPE type llama3 that are constants in Megatron."""


def rope_settings(hf: HfConfig) -> dict[str, Any]:
    """Return the RoPE settings, always with `rope_type` and `rope_theta`.

    transformers 5 keeps them in `rope_parameters`, and transformers 4 in `rope_scaling` and
    `rope_theta`. Raises KeyError if there is no `rope_theta`.
    """
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope["rope_theta"] if "rope_theta" in rope else hf["rope_theta"]
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


def given_rotary_fraction(hf: HfConfig) -> float | None:
    """Return `partial_rotary_factor` of config.json; None if there is none."""
    own = rope_settings(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    return None if own is None else float(own)


def rotary_fraction(hf: HfConfig) -> float:
    """Return the fraction of a head's dimensions that RoPE rotates, the first ones:
    `partial_rotary_factor`, by default 1."""
    own = given_rotary_fraction(hf)
    return 1.0 if own is None else own


def rope_scaling_factor(hf: HfConfig) -> float | None:
    """Return the factor of RoPE type llama3; None for all other types.

    Raises InputError if the factor is not a positive finite number, or if one of the type's other
    settings differs from Megatron's constant. Raises KeyError if there is no factor.
    """
    rope = rope_settings(hf)
    if rope["rope_type"] != LLAMA3:
        return None
    refuse(
        hf,
        (
            (
                rope.get(key) != value,
                f"RoPE type {LLAMA3} with {key} {rope.get(key)!r} is not supported, only {value}",
            )
            for key, value in LLAMA3_FIXED.items()
        ),
    )
    factor = rope["factor"]
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    wrong = not is_number or not 0 < factor < math.inf
    refuse(
        hf,
        [
            (
                wrong,
                f"RoPE type {LLAMA3} with factor {factor!r:.30}, expected a positive finite number",
            )
        ],
    )
    return float(factor)


def refuse(hf: HfConfig, findings: Iterable[tuple[Any, str]]) -> None:
    """Raise InputError if a condition in `findings` is true.

    `findings` are pairs (condition, message). The error has the message of the first condition that
    is true.
    """
    for wrong, text in findings:
        if wrong:
            raise InputError(f"config.json of this {hf['model_type']} model: {text}")


def refuse_unsupported(
    hf: HfConfig,
    rope_types: tuple[str, ...] = ROPE_TYPES,
    *,
    attention_bias: bool = False,
    partial_rotary: bool = False,
    layer_types: tuple[str, ...] = ("full_attention",),
) -> None:
    """Raise InputError for settings that no architecture in mrl supports, and for a RoPE type that
    is not in `rope_types`.

    `attention_bias` and `partial_rotary`: whether the architecture supports the key `attention_bias`,
    and RoPE on a part of each head. `layer_types`: the kinds of layers that it supports.
    """
    kind, act = rope_settings(hf)["rope_type"], hf.get("hidden_act", "silu")
    dropout = hf.get("attention_dropout")
    refuse(
        hf,
        (
            (
                not attention_bias and hf.get("attention_bias"),
                "attention_bias is not supported; use a model without it",
            ),
            (
                hf.get("use_sliding_window")
                or any(kind not in layer_types for kind in hf.get("layer_types") or ()),
                "sliding-window attention (use_sliding_window, layer_types) is not supported, only "
                "full attention",
            ),
            (
                kind not in rope_types,
                f"RoPE type {kind!r} is not supported, only {' and '.join(rope_types)}",
            ),
            (
                not partial_rotary and rotary_fraction(hf) != 1.0,
                "partial_rotary_factor is not supported, only 1.0",
            ),
            (act != "silu", f"hidden_act {act!r} is not supported, only 'silu'"),
            (dropout, f"attention_dropout {dropout} is not supported; set it to 0.0"),
        ),
    )


def refuse_constant_gate(hf: HfConfig, key: str | None = None) -> None:
    """Raise InputError if gate weights are renormalised and a token has only one expert, because the
    weight of this expert would always be 1.

    `key` is the setting that says whether they are renormalised; None for an architecture whose gate
    weights always are. Megatron refuses such a model too.
    """
    other = "" if key is None else f"{key} to false or "
    refuse(
        hf,
        (
            (
                (key is None or hf[key]) and hf["num_experts_per_tok"] == 1,
                "one expert per token with renormalised weights gives the router no gradient; set "
                f"{other}num_experts_per_tok to 2 or more",
            ),
        ),
    )


def head_dim(hf: HfConfig) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def query_groups(hf: HfConfig) -> int:
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def dense_sizes(hf: HfConfig) -> ModelSizes:
    """Return the sizes of a model without MoE layers."""
    return ModelSizes(
        num_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=query_groups(hf),
        vocab_size=hf["vocab_size"],
        dense_ffn_size=hf["intermediate_size"],
        num_experts=0,
    )


def no_moe_layers(hf: HfConfig) -> tuple[int, ...]:
    """Return the MoE layers of a dense model: none."""
    return ()


def decoder_config(hf: HfConfig, moe_layers: tuple[int, ...]) -> dict[str, Any]:
    """Return Megatron's settings for the decoder, except those for attention and experts."""
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "moe_layer_freq": [int(n + 1 in moe_layers) for n in range(hf["num_hidden_layers"])],
    }


def grouped_query_config(hf: HfConfig) -> dict[str, Any]:
    """Return Megatron's settings for grouped-query attention."""
    return {"num_query_groups": query_groups(hf), "kv_channels": head_dim(hf)}


def every_layer(hf: HfConfig) -> tuple[int, ...]:
    """Return the numbers of all layers, from 1: the MoE layers of a model without dense ones."""
    return tuple(range(1, hf["num_hidden_layers"] + 1))


def sparse_layers(hf: HfConfig, num_experts: int) -> tuple[int, ...]:
    """Return the 1-based numbers of Qwen's MoE layers.

    A layer is dense if `mlp_only_layers` lists its 0-based index, or if its 1-based number is not a
    multiple of `decoder_sparse_step`. All layers are dense if there are no experts.
    """
    dense = set(hf.get("mlp_only_layers") or ())
    step = hf.get("decoder_sparse_step", 1)
    return tuple(
        layer + 1
        for layer in range(hf["num_hidden_layers"])
        if layer not in dense and num_experts > 0 and (layer + 1) % step == 0
    )


def decoder_rules(hf: HfConfig) -> list[Rule]:
    """Return the rules of the embedding, the norms and the output layer.

    A rule names the HF tensors that form a Megatron parameter. The output layer has no rule if it
    is tied to the embedding.
    """
    table = [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows"),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Rule(f"{LAYER}.input_layernorm.weight", (f"{HF_LAYER}.input_layernorm.weight",)),
        Rule(f"{LAYER}.pre_mlp_layernorm.weight", (f"{HF_LAYER}.post_attention_layernorm.weight",)),
    ]
    if not hf.get("tie_word_embeddings"):
        table.append(Rule("output_layer.weight", ("lm_head.weight",), "rows"))
    return table


def grouped_query_rules(*, norms: bool = False, bias: bool = False) -> list[Rule]:
    """Return the rules of grouped-query attention. A rule names the HF tensors that form a Megatron
    parameter.

    `norms`: whether queries and keys have norms. `bias`: whether query, key and value have biases.
    """

    def qkv(kind: str) -> tuple[str, ...]:
        return tuple(f"{HF_ATTENTION}.{x}_proj.{kind}" for x in "qkv")

    table = [
        Rule(f"{ATTENTION}.linear_qkv.weight", qkv("weight"), "qkv"),
        Rule(f"{ATTENTION}.linear_proj.weight", (f"{HF_ATTENTION}.o_proj.weight",), "columns"),
    ]
    if bias:
        table.append(Rule(f"{ATTENTION}.linear_qkv.bias", qkv("bias"), "qkv"))
    if norms:
        table += [
            Rule(f"{ATTENTION}.{x}_layernorm.weight", (f"{HF_ATTENTION}.{x}_norm.weight",))
            for x in "qk"
        ]
    return table


def mlp_rules(
    megatron: str, hf: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Rule]:
    """Return the rules of a SwiGLU block: a dense MLP, an expert or a shared expert.

    A rule names the HF tensors that form a Megatron parameter. `megatron` and `hf` are the prefixes
    of the block's weight names. `names` are the HF names of its gate, up and down projections.
    """
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return [
        Rule(f"{megatron}.linear_fc1.weight", (gate, up), "gated"),
        Rule(f"{megatron}.linear_fc2.weight", (down,), "columns"),
    ]
