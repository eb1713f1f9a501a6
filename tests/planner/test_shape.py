"""Parameter counts of `mrl.planner.shape` against transformers' models and published counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.errors import InputError
from mrl.planner.shape import read_shape

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
       "v_head_dim": 10, "num_key_value_heads": 4, "first_k_dense_replace": 1,
       "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
       "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}  # fmt: skip
GLM = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
       "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}  # fmt: skip
NEXT = {"num_hidden_layers": 4, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8,
        "partial_rotary_factor": 0.25}  # fmt: skip
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", MOE | {"mlp_only_layers": [1]}),
    "qwen3_moe, every second layer": ("qwen3_moe", MOE | {"decoder_sparse_step": 2}),
    "qwen3_moe tied": ("qwen3_moe", MOE | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 24, "head_dim": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}),
    "glm4_moe": ("glm4_moe", GLM | {"attention_bias": True}),
    "glm4_moe with norms": ("glm4_moe", GLM | {"use_qk_norm": True, "first_k_dense_replace": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_next": ("qwen3_next", MOE | NEXT),
    "deepseek_v3": ("deepseek_v3", MLA),
    "deepseek_v32": (
        "deepseek_v32",
        MLA | {"index_n_heads": 3, "index_head_dim": 5, "index_topk": 2},
    ),
    "deepseek_v3, whole queries": ("deepseek_v3", MLA | {"q_lora_rank": None}),
}


@pytest.mark.parametrize("name", TINY)
def test_counts_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = TINY[name]
    config = AutoConfig.for_model(kind, **(COMMON | changes))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert shape.count().get("experts", 0) == experts


@pytest.mark.parametrize(
    ("file", "total", "active"),
    [("qwen3_30b_a3b.json", 30.5e9, 3.3e9), ("deepseek_v3.json", 671e9, 37e9)],
)
def test_counts_equal_the_published(file: str, total: float, active: float) -> None:
    shape = read_shape(json.loads((MODELS / file).read_text()))
    assert shape.num_parameters == pytest.approx(total, rel=2e-3)
    assert shape.num_active == pytest.approx(active, rel=2e-2)


def test_other_configs_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"'gemma2' is not in .*: expected one of .*qwen3_moe"):
        read_shape({"model_type": "gemma2"})
    with pytest.raises(InputError, match="qwen3 lacks the key 'rope_theta'"):
        read_shape({"model_type": "qwen3", "num_hidden_layers": 2})
