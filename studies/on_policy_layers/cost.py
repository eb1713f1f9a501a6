"""What the mode costs, in CPU seconds (others use this machine too), both modes by turns.

The engine: one rollout of the toy recipe, 128 requests of 9 + 32 tokens; the CPU time of all processes
of its server. The trainer: log-probs of these tokens without gradients, and forward and backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.routes import Replay
from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import EngineConfig, Request, SamplingParams
from mrl.engines.sglang.engine import Engine
from mrl.types import LossOutput, MicroBatch
from studies.on_policy_layers.trainer_side import join_mesh, make_policy, packed
from tests.ranks import run_ranks

NUM_REQUESTS, PROMPT_LEN, NUM_NEW = 128, 9, 32
TURNS = 5
MODES = {"off": False, "on": True}


def cost(folder: Path, scratch: Path) -> dict[str, Any]:
    """Return the medians by mode and their ratio, of each part and of the sum of the parts."""
    [trainer] = run_ranks(1, trainer_seconds, folder, folder=scratch / "cost_rank")
    seconds = {mode: {**trainer[mode], "rollout": value}
               for mode, value in engine_seconds(folder, scratch).items()}  # fmt: skip
    for parts in seconds.values():
        parts["all"] = sum(parts.values())
    return {
        "cpu_seconds": {m: {k: round(v, 3) for k, v in p.items()} for m, p in seconds.items()},
        "on_over_off": {k: round(seconds["on"][k] / v, 2) for k, v in seconds["off"].items()},
    }


def by_turns(ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Median of TURNS of each, after one that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            value = way()
            if turn:
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


def prompts() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 96, (NUM_REQUESTS, PROMPT_LEN + NUM_NEW), generator=generator)


def engine_seconds(folder: Path, scratch: Path) -> dict[str, float]:
    sampling = SamplingParams(NUM_NEW, NUM_NEW)
    requests = [Request(str(i), x[:PROMPT_LEN], i, sampling) for i, x in enumerate(prompts())]
    engines = {
        mode: Engine(
            EngineConfig(
                model=ModelConfig(path=str(folder), dtype="float32"),
                rollout=RolloutConfig(max_response_len=NUM_NEW, true_on_policy=on),
                log_path=scratch / f"cost_{mode}.log",
            )
        )
        for mode, on in MODES.items()
    }

    def rollout(engine: Engine) -> float:
        before = _tree_seconds(engine)
        assert len(list(engine.endpoint.generate(requests))) == NUM_REQUESTS
        return _tree_seconds(engine) - before

    try:
        for engine in engines.values():
            engine.start()
        return by_turns({mode: lambda e=engine: rollout(e) for mode, engine in engines.items()})
    finally:
        for engine in engines.values():
            engine.stop()


def _tree_seconds(engine: Engine) -> float:
    times = [process.cpu_times() for process in engine.connection.process.tree()]
    return sum(t.user + t.system for t in times)


def trainer_seconds(folder: Path) -> dict[str, dict[str, float]]:
    """Return the trainer's CPU seconds by part; runs on a rank."""
    mesh = join_mesh()
    policies = {mode: make_policy(folder, mesh, on) for mode, on in MODES.items()}
    batch = packed([(ids, PROMPT_LEN) for ids in prompts()])

    def loss(logprobs: Tensor, batch: MicroBatch) -> LossOutput:
        return LossOutput(logprobs.sum() * 1e-4)

    def timed(work: Callable[[], Any]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    def forward(policy: Any) -> Callable[[], float]:
        return lambda: timed(lambda: policy.forward_only([batch], Replay.off))

    def backward(policy: Any) -> Callable[[], float]:
        return lambda: timed(lambda: policy.runner.run([batch], loss, Replay.off))

    parts = {"log-probs": forward, "forward and backward": backward}
    found = {part: by_turns({mode: way(p) for mode, p in policies.items()})
             for part, way in parts.items()}  # fmt: skip
    return {mode: {part: found[part][mode] for part in parts} for mode in MODES}
