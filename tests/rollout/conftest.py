"""One real SGLang server for most tests; a Hugging Face model beside it as the oracle."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from mrl.config import ModelConfig, RolloutConfig
from mrl.rollout import load_engine
from mrl.rollout.sglang import Engine
from mrl.toy_model import write_toy_model
from mrl.types import Prompt, WeightBucket


def make_prompts(num: int, *, seed: int = 0, num_tokens: int = 20) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (num, num_tokens), generator=generator)
    return [Prompt(f"{seed}-{i}", row.clone(), "text", {}, f"x:{i}") for i, row in enumerate(ids)]


def make_engine(folder: Path, log_path: Path, **config: object) -> Engine:
    settings = {"max_response_len": 32, "start_timeout_s": 120.0, **config}
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
        yield WeightBucket(weights[start : start + size], version)


@functools.cache
def load_oracle(folder: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy_model(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(toy_folder: Path) -> Qwen3MoeForCausalLM:
    return load_oracle(toy_folder)


@pytest.fixture(scope="session")
def toy_weights(oracle, tmp_path_factory) -> list[tuple[str, torch.Tensor]]:
    return named_weights(oracle, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def shared_engine(toy_folder: Path, tmp_path_factory) -> Iterator[Engine]:
    engine = make_engine(toy_folder, tmp_path_factory.mktemp("logs") / "engine.log")
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def engine(shared_engine: Engine, toy_weights) -> Engine:
    """The shared engine, awake and with the checkpoint's weights as version 0."""
    shared_engine.wake()
    shared_engine.update_weights(make_buckets(toy_weights, 0), 0)
    return shared_engine
