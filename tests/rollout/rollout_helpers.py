"""What the tests of this folder share. Not in conftest.py: other folders have one of that name."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from slow_steps import server_args as slow_steps_args
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import Adapter
from mrl.engine_pool.engine_nodes import free_address
from mrl.engines import load_engine
from mrl.engines.base import Completion, EngineConfig, Request, RolloutEngine, SamplingParams
from mrl.engines.sglang.engine import Engine
from mrl.toy_model import build_tokenizer, write_toy_model
from mrl.types import Prompt, RoutingTrace, SampleGroup, WeightBucket
from tests.parallel.models import DENSE, checkpoint_tensors, write_tiny

GPUS = tuple(filter(None, os.environ.get("MRL_CONFORMANCE_GPUS", "").split(",")))
"""The GPUs of the engine under test; empty runs it on the CPU."""
TOLERANCE = 2e-3 if GPUS else 1e-5
"""The bound for log-probs against transformers in float32 on a CPU."""
MODEL = os.environ.get("MRL_CONFORMANCE_MODEL", "")
"""The architecture under test, one of tests/parallel/models.py; empty is the toy, a Qwen3-MoE."""
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2_moe": {"decoder_sparse_step": 1},
}
SLOW = Path(tempfile.gettempdir()) / f"mrl-slow-steps-{os.getpid()}"
"""While this file exists, each step of this process's engines waits; see slow_steps.py."""
follows_seeds = pytest.mark.skipif(
    bool(GPUS), reason="on GPUs SGLang's sampling does not follow the request's seed"
)


def write_model(folder: Path) -> None:
    """Write the toy, or a model of MODEL's architecture with the toy's vocabulary and 4 layers."""
    if not MODEL:
        write_toy_model(folder)
        return
    tokenizer = build_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    write_tiny(MODEL, folder, **sizes, **ends, **CHANGES.get(MODEL, {}))
    tokenizer.save_pretrained(folder)


def trace_of(completion: Completion) -> RoutingTrace | None:
    """Return the routes of a completion, which every MoE has and no dense model has."""
    assert (completion.routing is None) == (MODEL in DENSE)
    return completion.routing


def make_prompts(num: int, *, seed: int = 0, num_tokens: int = 20) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (num, num_tokens), generator=generator)
    return [Prompt(f"{seed}-{i}", row.clone(), "text", {}, f"x:{i}") for i, row in enumerate(ids)]


def make_requests(
    num: int, sampling: SamplingParams, *, seed: int = 0, num_tokens: int = 20
) -> list[Request]:
    prompts = make_prompts(num, seed=seed, num_tokens=num_tokens)
    return [Request(p.prompt_id, p.token_ids, i, sampling) for i, p in enumerate(prompts)]


def generate(
    engine: RolloutEngine,
    prompts: list[Prompt],
    *,
    samples_per_prompt: int,
    sampling: SamplingParams,
    seed: int,
    first_group_id: int = 0,
) -> list[SampleGroup]:
    """Whole groups in the order of the prompts."""
    groups = start_groups(prompts, samples_per_prompt, first_group_id)
    done = list(SingleTurnRollout(groups, sampling, seed).finished(engine.endpoint))
    return sorted(done, key=lambda group: group.samples[0].group_id)


def make_engine(
    folder: Path, log_path: Path, adapter: Adapter | None = None, **config: object
) -> Engine:
    """The engine under test: SGLang on one rank, unless benchmarks/conformance.py says otherwise."""
    settings = {
        "max_response_len": 32,
        "start_timeout_s": 240.0,
        "max_total_tokens": 4096,  # little, so that the engine has to take requests back
        "tensor_parallel_size": int(os.environ.get("MRL_CONFORMANCE_TP", "1")),
        "expert_parallel_size": int(os.environ.get("MRL_CONFORMANCE_EP", "1")),
        "data_parallel_attention_size": int(os.environ.get("MRL_CONFORMANCE_DP", "1")),
        "server_args": {
            **slow_steps_args(SLOW),
            **json.loads(os.environ.get("MRL_CONFORMANCE_SERVER_ARGS", "{}")),
        },
        **config,
    }
    engine_class = load_engine(os.environ.get("MRL_CONFORMANCE_ENGINE", "sglang"))
    num_nodes = int(os.environ.get("MRL_CONFORMANCE_NODES", "1"))
    engine_config = EngineConfig(
        model=ModelConfig(path=str(folder), dtype="float32"),
        rollout=RolloutConfig.model_validate(settings),
        log_path=log_path,
        return_routes=MODEL not in DENSE,
        gpu_ids=GPUS[: int(settings["tensor_parallel_size"])] if num_nodes == 1 else (),
        num_nodes=num_nodes,
        adapter=adapter,
    )
    if num_nodes > 1:
        return cast(Engine, OnNodes(engine_class, engine_config))
    return cast(Engine, engine_class(engine_config))  # tests of SGLang alone look inside


@contextlib.contextmanager
def slow_steps() -> Iterator[None]:
    """What generates here is still in the middle when its first short request has come back."""
    SLOW.touch()
    try:
        yield
    finally:
        SLOW.unlink()


class OnNodes:
    """An engine over several "nodes", which are processes of this machine that meet on loopback.

    What mrl.engine_pool.engine_nodes does between ranks of a run is done here in one process.
    """

    def __init__(self, engine_class: Any, config: EngineConfig) -> None:
        self._engine = engine_class(config)
        self.nodes = [
            engine_class.Node(replace(config, log_path=config.log_path.with_suffix(f".{n}")), n)
            for n in range(1, config.num_nodes)
        ]

    def start(self) -> None:
        if self._engine.process_id is not None:
            self._engine.start()  # refuses, and the nodes go on
        address = free_address()
        for node in self.nodes:
            node.start(address)
        try:
            self._engine.start(address, self._watch)
        except BaseException:
            self.stop()
            raise
        for node in self.nodes:
            node.note_ready()

    def _watch(self) -> None:
        failed = [failure for node in self.nodes if (failure := node.failure())]
        if failed:
            raise RuntimeError(failed[0])

    def stop(self) -> None:
        self._engine.stop()
        for node in self.nodes:
            node.stop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def named_weights(model: Any, folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Return weights under the names that the trainer sends: transformers fuses experts in memory."""
    model.save_pretrained(folder)
    return sorted(checkpoint_tensors(folder).items())


def make_buckets(
    weights: list[tuple[str, torch.Tensor]], version: int, *, size: int = 40
) -> Iterator[WeightBucket]:
    for start in range(0, len(weights), size):
        is_last = start + size >= len(weights)
        yield WeightBucket(weights[start : start + size], version, is_last=is_last)


@functools.cache
def load_oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def moe_layers(model: Any) -> tuple[int, ...]:
    """Return the numbers, from 1, of the layers of a transformers model that have experts."""
    return tuple(
        number
        for number, layer in enumerate(model.model.layers, start=1)
        if any(name.endswith("experts") for name, _ in layer.named_modules())
    )


def score(model: Any, ids: Tensor, prompt_len: int, temperature: float, least: int = 0):
    """transformers' log-probs f32[T - P] of the completion and its routes i64[T-1, L, K], which are
    empty for a dense model. The first `least` tokens of the completion could not be the end of the
    sequence."""
    chosen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1]))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    try:
        with torch.no_grad():
            out = model(ids[None])
    finally:
        for hook in hooks:
            hook.remove()
    logits = out.logits[0, :-1] / temperature
    logits[prompt_len - 1 : prompt_len - 1 + least, model.config.eos_token_id] = -torch.inf
    logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    if MODEL in DENSE:
        return logprobs[prompt_len - 1 :], torch.empty(len(ids) - 1, 0, 0, dtype=torch.int64)
    return logprobs[prompt_len - 1 :], torch.stack([each[:-1] for each in chosen], 1)
