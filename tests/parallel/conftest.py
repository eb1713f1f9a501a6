"""Tiny models and samples that every test of the room shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe.align import routes_of_trace
from mrl.types import RoutingTrace, Sample, VersionSpan
from parallel.packing import WeightedSample

VOCAB, EXPERTS, TOPK = 64, 4, 2
MOE_LAYERS = (1, 3, 4)


def write_model(folder: Path, **changes: Any) -> Path:
    """Qwen3-MoE of 4 layers, the second one dense, with weights large enough to tell apart."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
    }
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, **changes})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "untied")


@pytest.fixture(scope="session")
def tied_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model") / "tied", tie_word_embeddings=True, norm_topk_prob=False
    )


def make_sample(
    generator: torch.Generator, length: int, prompt_len: int, group_id: int = 0
) -> Sample:
    """Random tokens, with random routes that hardly ever agree with the model's own."""
    weights = torch.rand(length - 1, len(MOE_LAYERS), EXPERTS, generator=generator)
    return Sample(
        group_id=group_id,
        token_ids=torch.randint(0, VOCAB, (length,), generator=generator),
        prompt_len=prompt_len,
        loss_mask=torch.arange(length) >= prompt_len,
        rollout_logprobs=-torch.rand(length, generator=generator),
        weight_versions=(VersionSpan(0, prompt_len, length),),
        finish_reason="length",
        routing=RoutingTrace(
            weights.topk(TOPK).indices.to(torch.uint8),
            MOE_LAYERS,
            EXPERTS,
            row_versions=(VersionSpan(0, 0, length - 1),),
            num_cached_rows=0,
        ),
    )


def weighted(sample: Sample, advantage: float = 1.0, weight: float = 1.0) -> WeightedSample:
    """Weigh a sample, with the routes of all its layers."""
    routes = None if sample.routing is None else routes_of_trace(sample.routing)
    return WeightedSample(sample, advantage, weight, routes=routes)


def make_samples() -> list[Sample]:
    """13 samples of uneven lengths: 2, 4 or 8 ranks cannot share them evenly."""
    generator = torch.Generator().manual_seed(1)
    lengths = [7, 31, 12, 40, 9, 22, 17, 5, 28, 33, 6, 14, 19]
    return [make_sample(generator, n, prompt_len=3) for n in lengths]


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return make_samples()
