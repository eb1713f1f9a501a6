"""DeepSeek-V3.2: DeepSeek-V3 (`parallel.architectures.deepseek_v3`) with sparse attention. In each
layer an indexer chooses the keys that a query sees (`parallel.layers.indexer`).

Source: `DeepseekV32ForCausalLM` of transformers, the report of DeepSeek-V3.2 (arXiv 2512.02556), and
its published inference code.
"""

from __future__ import annotations

from typing import Any

from parallel.architectures import common, deepseek_moe, deepseek_v3
from parallel.architectures.base import Architecture, HfConfig, Rule

LAYER_TYPES = ("full_attention", "indexed_attention")
"""transformers calls a layer with an indexer `indexed_attention`; the published config.json has no
kinds."""
INDEXER, HF_INDEXER = f"{common.ATTENTION}.indexer", f"{common.HF_ATTENTION}.indexer"


def transformer_config(hf: HfConfig) -> dict[str, Any]:
    settings = deepseek_v3.transformer_config(hf, LAYER_TYPES)
    _refuse_other_layers(hf)
    return {
        **settings,
        "dsa_indexer_n_heads": hf["index_n_heads"],
        "dsa_indexer_head_dim": hf["index_head_dim"],
        "dsa_indexer_topk": hf["index_topk"],
    }


def _refuse_other_layers(hf: HfConfig) -> None:
    counts = {key: hf[key] for key in ("index_n_heads", "index_head_dim", "index_topk")}
    wrong = [
        key
        for key, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, int) or count < 1
    ]
    rotary, dense = hf["qk_rope_head_dim"], hf["first_k_dense_replace"]
    kinds = hf.get("mlp_layer_types")
    expected = ["dense"] * dense + ["sparse"] * (hf["num_hidden_layers"] - dense)
    common.refuse(
        hf,
        (
            (
                wrong,
                f"{wrong[0] if wrong else ''} is {counts[wrong[0]] if wrong else ''!r}, expected a "
                "positive whole number",
            ),
            (
                not wrong and counts["index_head_dim"] < rotary,
                f"index_head_dim {counts['index_head_dim']} is less than qk_rope_head_dim {rotary}, "
                "which RoPE rotates in the indexer, too",
            ),
            (
                not hf["q_lora_rank"],
                "q_lora_rank is null, but the indexer reads the queries' latent",
            ),
            (
                kinds is not None and list(kinds) != expected,
                f"mlp_layer_types differs from first_k_dense_replace {dense}; expected {dense} dense "
                "layers, and then sparse ones",
            ),
            (
                hf.get("indexer_rope_interleave"),
                "indexer_rope_interleave true is not supported: the indexer's RoPE is not interleaved",
            ),
        ),
    )


def rules(hf: HfConfig) -> list[Rule]:
    return [*deepseek_v3.rules(hf), *_indexer_rules()]


def _indexer_rules() -> list[Rule]:
    """Return the rules of the indexers. Every tensor-parallel rank holds them whole."""
    table = (
        ("query_weight", "wq_b.weight"),
        ("key_weight", "wk.weight"),
        ("head_weight", "weights_proj.weight"),
    )
    norm = (("key_norm_weight", "k_norm.weight"), ("key_norm_bias", "k_norm.bias"))
    return [
        *(Rule(f"{INDEXER}.{ours}", (f"{HF_INDEXER}.{hf}",), is_frozen=True) for ours, hf in table),
        *(Rule(f"{INDEXER}.{ours}", (f"{HF_INDEXER}.{hf}",), is_buffer=True) for ours, hf in norm),
    ]


ARCHITECTURE = Architecture(
    model_type="deepseek_v32",
    sizes=deepseek_v3.sizes,
    transformer_config=transformer_config,
    rules=rules,
    moe_layer_numbers=deepseek_moe.moe_layer_numbers,
    unread=deepseek_moe.unread,
    needs_native="Megatron's sparse attention refuses packed sequences",
)
