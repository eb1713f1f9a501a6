"""Tiny models of every architecture, and variants with other settings of config.json."""

from __future__ import annotations

from typing import Any

from tests.parallel.models import COMMON, GPT_OSS_YARN, LLAMA3, SETTINGS, YARN

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SETTINGS},
    "qwen3 tied, llama3 rope": (
        "qwen3",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "qwen2 tied, llama3 rope": (
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama tied, llama3 rope": (
        "llama",
        {"tie_word_embeddings": True, "head_dim": 24, "rope_parameters": LLAMA3},
    ),
    "qwen3_moe llama3 rope": ("qwen3_moe", {"rope_parameters": LLAMA3}),
    "qwen2_moe renormalised, no bias, llama3 rope": (
        "qwen2_moe",
        {"norm_topk_prob": True, "qkv_bias": False, "rope_parameters": LLAMA3},
    ),
    "qwen2_moe mlp_only": ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}),
    "olmoe grouped queries, renormalised, llama3 rope": (
        "olmoe",
        {"num_key_value_heads": 2, "norm_topk_prob": True, "rope_parameters": LLAMA3},
    ),
    "glm4_moe norms, no biases, llama3 rope, no groups": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": False,
            "first_k_dense_replace": 2,
            "n_group": 1,
            "num_experts_per_tok": 3,
            "rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.25},
        },
    ),
    "gpt_oss truncated yarn, other windows, larger limit": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "sliding_window": 3,
            "swiglu_limit": 1.0,
            "rope_parameters": {**GPT_OSS_YARN, "truncate": True},
        },
    ),
    "gpt_oss full attention, no yarn": (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 4, "rope_parameters": COMMON["rope_parameters"]},
    ),
    "deepseek_v3 no q latent, no yarn, no groups": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "n_group": 1,
            "num_experts_per_tok": 3,
            "rope_parameters": COMMON["rope_parameters"],
        },
    ),
    "deepseek_v32 other indexer, no yarn, no groups": (
        "deepseek_v32",
        {
            "index_n_heads": 5,
            "index_head_dim": 8,  # RoPE rotates all of it
            "index_topk": 1,
            "n_group": 1,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 2,
            "rope_parameters": COMMON["rope_parameters"],
        },
    ),
    "deepseek_v3 yarn without mscale": (
        "deepseek_v3",
        {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    ),
}
RELEASED = (
    "qwen2 tied, llama3 rope",
    "llama tied, llama3 rope",
    "qwen3_moe llama3 rope",
    "gpt_oss full attention, no yarn",
)
"""Variants whose settings `make test` has in a variant of another model, or in the model itself."""
