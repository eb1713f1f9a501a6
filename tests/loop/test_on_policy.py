"""rollout.true_on_policy with the real SGLang: its log-probs are the trainer's, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import EngineConfig
from mrl.engines.sglang.settings import server_environment, server_settings
from mrl.toy_model import write_toy_model
from studies.on_policy_layers.causes import causes
from tests.loop.conftest import Toy, trained
from tests.ranks import run_ranks

ODD: dict[str, Any] = {
    "hidden_size": 72,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 12,
    "num_experts_per_tok": 4,
}
"""No whole numbers of lanes, and enough experts a token that the order of their sum counts."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Two steps: the second with trained weights. Other batches in the engine than in the trainer."""
    folder = tmp_path_factory.mktemp("on_policy")
    write_toy_model(folder / "model", **ODD)
    overrides = Toy(folder / "model").overrides(
        folder / "run",
        "train.num_steps=2",
        "rollout.true_on_policy=true",
        "rollout.temperature=0.7",
        "rollout.max_running_requests=5",
        "checkpoint.save_every=0",
    )
    run_ranks(1, trained, overrides, folder=folder / "out")
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.release
def test_logprobs_are_the_engines_bit_for_bit(steps: list[dict]) -> None:
    assert [step["tokens/rollout"] > 100 for step in steps] == [True, True]
    assert [step["mismatch/logprob_abs_max"] for step in steps] == [0.0, 0.0]


@pytest.mark.release
def test_routers_agree_and_the_ratio_is_one(steps: list[dict]) -> None:
    assert [step["routing/disagreement"] for step in steps] == [0.0, 0.0]
    assert [step["ratio/max"] for step in steps] == [1.0, 1.0]


def test_each_cause_is_there_and_mended() -> None:
    """Needs no engine: torch's ways of computing differ, the mode's do not."""
    found = causes()
    for cause in found:
        # Both sides call the same function of torch for the norm.
        assert cause.off.is_equal == cause.what.startswith("RMSNorm"), cause.what
        assert cause.mended is None or cause.mended.is_equal, cause.what
    assert sum(cause.mended is not None for cause in found) == 4


@pytest.mark.parametrize("on", [False, True])
def test_the_plugin_is_on_the_path_in_this_mode_only(on: bool) -> None:
    environment = server_environment((), 1, batch_invariant=on)
    assert ("plugins/on_policy" in environment["PYTHONPATH"]) == on
    assert "plugins/on_policy" not in server_environment((0,), 1, batch_invariant=on)["PYTHONPATH"]


def test_on_gpus_the_engine_is_asked_to_be_deterministic() -> None:
    """What can be said without a GPU: the argument, and that the installed SGLang has it."""
    from mrl.engines.sglang.arguments import field_names

    rollout = RolloutConfig(max_response_len=8, true_on_policy=True)
    config = EngineConfig(ModelConfig(path="somewhere"), rollout, Path("engine.log"), gpu_ids=(0,))
    settings = server_settings(config, context_len=64)
    assert settings["enable_deterministic_inference"] is True
    assert "enable_deterministic_inference" in field_names()
