"""SGLang's own ServerArgs takes exactly the settings that an engine on GPUs is started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import EngineConfig
from mrl.engines.sglang.launch import read_launch
from mrl.engines.sglang.settings import CPU_STUBS, server_environment

# test_server_args.py compares names, choices and defaults with the installed SGLang in `make test`.
pytestmark = pytest.mark.release
PROGRAM = Path(__file__).parent / "resolve_server_args.py"
ENGINES: dict[str, dict[str, Any]] = {
    "one GPU": {},
    "weights kept on the host": {"keep": True},
    "TP 2, sizes of its own": {
        "tensor_parallel_size": 2,
        "max_total_tokens": 4096,
        "max_running_requests": 64,
        "context_len": 256,
    },
    "experts and attention shared out": {
        "tensor_parallel_size": 8,
        "expert_parallel_size": 8,
        "data_parallel_attention_size": 4,
    },
    "two nodes": {"tensor_parallel_size": 16, "expert_parallel_size": 8, "nodes": 2},
    "true on-policy": {"true_on_policy": True, "server_args": {"attention_backend": "fa3"}},
    "arguments of the recipe": {
        "server_args": {"attention_backend": "triton", "moe_runner_backend": "triton"}
    },
}


def start_settings(model: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """What `mrl.engines.sglang.process` writes to the child."""
    config = {k: v for k, v in engine.items() if k not in ("nodes", "keep")}
    nodes = engine.get("nodes", 1)
    rollout = RolloutConfig.model_validate({"max_response_len": 8, **config})
    of_engine = EngineConfig(
        ModelConfig(path=str(model)),
        rollout,
        Path("engine.log"),
        gpu_ids=range(rollout.tensor_parallel_size // nodes),
        seed=7,
        keep_weights_on_host=engine.get("keep", False),
        num_nodes=nodes,
    )
    launch = read_launch(of_engine, node_rank=nodes - 1)
    address = "127.0.0.1:31001" if nodes > 1 else ""
    started = launch.settings | launch.start_settings(0, address)
    return {**started, "host": "127.0.0.1", "port": 31000, "api_key": "key"}


def resolve(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ours = {
        **server_environment((0,), 1),
        "PYTHONPATH": os.pathsep.join((str(CPU_STUBS), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(settings),
        env=os.environ | ours,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers(toy_folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return for each engine what it is started with, and what SGLang resolves that to."""
    sent = {name: start_settings(toy_folder, engine) for name, engine in ENGINES.items()}
    plain = sent["one GPU"]
    sent["wrong"] = {**plain, "tp_size": 8, "dp_size": 3, "enable_dp_attention": True}
    return dict(
        zip(sent, zip(sent.values(), resolve(list(sent.values())), strict=True), strict=True)
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_sglang_takes_what_an_engine_on_gpus_is_started_with(engine, answers) -> None:
    sent, got = answers[engine]
    assert "refused" not in got
    assert got["device"] == "cuda"
    assert {name: got[name] for name in sent} == sent
    assert got["enable_memory_saver"] is got["skip_server_warmup"] is True


def test_sglang_refuses_sizes_that_do_not_divide(answers) -> None:
    assert "refused" in answers["wrong"][1]
