"""Tiny Hugging Face checkpoints of every architecture, and samples with random routes for them.

Weights are large enough that every parameter can be seen in the log-probs, and no two are alike.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mrl.types import RoutingTrace, Sample, VersionSpan
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors

VOCAB = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DENSE = ("qwen3", "qwen2", "llama")
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {**COMMON["rope_parameters"], "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 0.5,
            "rope_parameters": GPT_OSS_YARN,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 16,
            # With 0.15, weights that differ by 1e-7 change the norm of the gradient by 1e-4.
            "initializer_range": 0.05,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rope_parameters": {**COMMON["rope_parameters"], "partial_rotary_factor": 0.25},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "rope_parameters": YARN,
        },
    ),
}
SETTINGS["deepseek_v32"] = (
    "DeepseekV32",
    {**SETTINGS["deepseek_v3"][1], "index_n_heads": 8, "index_head_dim": 12, "index_topk": 6},
)
"""The prefix of transformers' class names and what differs from COMMON, by model_type."""


def write_tiny(model_type: str, folder: Path, **changes: Any) -> Path:
    """Write a 4-layer fp32 checkpoint of `model_type` with `changes` to its config -> its folder."""
    name, settings = SETTINGS[model_type]
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or key.endswith(("bias", "e_score_correction_bias", "sinks")):
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return folder


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint under the names of the rules, those of experts apart."""
    with HfTensors(HfModel.read(folder)) as tensors:
        return {name: tensors[name] for name in tensors.names}


def reference_logprobs(folder: Path, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """f32[T-1]: what transformers gives for tokens 1 to T-1 of one sequence i64[T]."""
    with torch.no_grad():
        logits = _reference(folder)(token_ids.unsqueeze(0)).logits[0] / temperature
    return logits.log_softmax(-1)[:-1].gather(1, token_ids[1:, None])[:, 0]


@functools.cache
def _reference(folder: Path) -> Any:
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def tiny_samples(folder: Path, lengths: Sequence[int] = (7, 31, 12, 40, 14), seed: int = 1) -> list:
    """Samples for the model in `folder`: random tokens, prompts of 3, and, for a model with experts,
    random routes for its MoE layers that hardly ever agree with its own."""
    model = HfModel.read(folder)
    generator = torch.Generator().manual_seed(seed)
    return [_sample(model, generator, length) for length in lengths]


def _sample(model: HfModel, generator: torch.Generator, length: int) -> Sample:
    numbers, experts = model.moe_layer_numbers, model.sizes.num_experts
    routing = None
    if numbers:
        topk = model.config["num_experts_per_tok"]
        order = torch.rand(length - 1, len(numbers), experts, generator=generator)
        ids = order.topk(topk).indices.to(torch.uint8)
        routing = RoutingTrace(ids, numbers, experts, (VersionSpan(0, 0, length - 1),), 0)
    return Sample(
        group_id=0,
        token_ids=torch.randint(0, VOCAB, (length,), generator=generator),
        prompt_len=3,
        loss_mask=torch.arange(length) >= 3,
        rollout_logprobs=-torch.rand(length, generator=generator),
        weight_versions=(VersionSpan(0, 3, length),),
        finish_reason="length",
        routing=routing,
    )
