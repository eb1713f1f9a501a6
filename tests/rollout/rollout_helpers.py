"""What the tests of this folder share. Not in conftest.py: other folders have one of that name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from mrl.config import ModelConfig, RolloutConfig
from mrl.rollout import load_engine
from mrl.rollout.sglang import Engine
from mrl.types import Prompt, Sample, WeightBucket


def make_prompts(num: int, *, seed: int = 0, num_tokens: int = 20) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (num, num_tokens), generator=generator)
    return [Prompt(f"{seed}-{i}", row.clone(), "text", {}, f"x:{i}") for i, row in enumerate(ids)]


def make_engine(folder: Path, log_path: Path, **config: object) -> Engine:
    settings = {"max_response_len": 32, "start_timeout_s": 300.0, **config}
    engine = load_engine("sglang")(
        model=ModelConfig(path=str(folder)),
        config=RolloutConfig.model_validate(settings),
        log_path=log_path,
    )
    assert isinstance(engine, Engine)
    return engine


def named_weights(model: Qwen3MoeForCausalLM, folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Under the names of the checkpoint: transformers fuses experts in memory."""
    model.save_pretrained(folder)
    from safetensors.torch import load_file

    return sorted(load_file(folder / "model.safetensors").items())


def make_buckets(
    weights: list[tuple[str, torch.Tensor]], version: int, *, size: int = 40
) -> Iterator[WeightBucket]:
    for start in range(0, len(weights), size):
        is_last = start + size >= len(weights)
        yield WeightBucket(weights[start : start + size], version, is_last=is_last)


@functools.cache
def load_oracle(folder: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def score(model: Qwen3MoeForCausalLM, sample: Sample, temperature: float):
    """transformers' log-probs f32[T - P] of the completion and its routes i64[T-1, L, K]."""
    with torch.no_grad():
        out = model(sample.token_ids[None], output_router_logits=True)
    logits = out.logits[0, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1).gather(1, sample.token_ids[1:, None])[:, 0]
    routes = [logits.topk(2, -1).indices[:-1] for logits in out.router_logits]
    return logprobs[sample.prompt_len - 1 :], torch.stack(routes, 1)
