"""An engine's life on GPUs, rehearsed without one: its environment, and the order of all calls.

Everything of mrl is real, the child process too. What the child imports as `sglang` is the folder
recording_sglang/, a server that records and that dies where SGLang's scheduler would. Handles to CUDA
memory cannot be made here: the weights travel as they do on CPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout_helpers import make_buckets, make_requests
from safetensors.torch import load_file

from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import CUDA_GRAPH, KV_CACHE, WEIGHTS, EngineConfig, SamplingParams
from mrl.engines.sglang.engine import Engine
from mrl.errors import InputError
from mrl.kernels.digest import weight_digest
from mrl.preflight.allocator import check_allocator
from tests.release import release

RECORDING_SGLANG = Path(__file__).parent / "recording_sglang"
EXPANDABLE = "expandable_segments:True"
RELEASED = [KV_CACHE, CUDA_GRAPH, WEIGHTS]


class Rehearsal:
    """An engine that believes in two GPUs, and what its server recorded."""

    def __init__(self, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_sessions = False
        self.weights = sorted(load_file(model / "model.safetensors").items())
        self._record = folder / "record.jsonl"
        held = {
            f"{rank} {name}": f"float32 1 {weight_digest(tensor)[0]:x}"
            for name, tensor in self.weights
            for rank in (0, 1)
        }
        (folder / "held.json").write_text(json.dumps(held))
        monkeypatch.setenv("PYTHONPATH", str(RECORDING_SGLANG))
        monkeypatch.setenv("MRL_RECORD", str(self._record))
        monkeypatch.setenv("MRL_RECORD_HELD", str(folder / "held.json"))
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.setenv(name, EXPANDABLE)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("SGLANG_CACHE_DIR", str(folder / "cache"))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        config = EngineConfig(
            model=ModelConfig(path=str(model)),
            rollout=RolloutConfig(max_response_len=8, tensor_parallel_size=2, start_timeout_s=60),
            log_path=folder / "engine.log",
            return_routes=False,
            gpu_ids=("4", "5"),
            seed=7,
        )
        self.engine = Engine(config)

    def calls(self) -> list[tuple[str, dict]]:
        lines = self._record.read_text().splitlines()
        return [(path, body) for path, body in map(json.loads, lines)]


@pytest.fixture(params=[release("", id="without_session"), pytest.param("1", id="with_session")])
def rehearsal(request, toy_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MRL_RECORD_SESSIONS", request.param)
    rehearsal = Rehearsal(toy_folder, tmp_path, monkeypatch)
    rehearsal.has_sessions = bool(request.param)
    yield rehearsal
    rehearsal.engine.stop()


def test_two_steps_on_gpus_that_are_not_there(rehearsal, tmp_path) -> None:
    engine = rehearsal.engine
    engine.start()
    engine.sleep()  # as LocalPool.start does
    for version in (1, 2):  # as LocalPool.sync and LocalPool.rollout do
        engine.wake((WEIGHTS,))
        engine.endpoint.update_weights(make_buckets(rehearsal.weights, version, size=60), version)
        engine.wake((KV_CACHE, CUDA_GRAPH))
        requests = make_requests(3, SamplingParams(max_new_tokens=4))
        engine.endpoint.sequence_logprobs([requests[0].token_ids])  # the canaries
        assert len(list(engine.endpoint.generate(requests))) == 3
        engine.sleep()
    calls = rehearsal.calls()
    num_buckets = -(-len(rehearsal.weights) // 60)
    begin, end = ([f"/{name}_weight_update"] * rehearsal.has_sessions for name in ("begin", "end"))
    update = [*begin, *["/update_weights_from_tensor"] * num_buckets, *end, "/weights_checker"]
    rest = ["/flush_cache", "/release_memory_occupation"]
    step = [
        "/resume_memory_occupation", *update, "/resume_memory_occupation",
        "/generate", "/flush_cache", "/generate", *rest,
    ]  # fmt: skip
    # The last call of a start is a flush: the first rollout finds an empty cache without a sleep too.
    assert [path for path, _ in calls] == ["START", "/generate", "/flush_cache", *rest, *step * 2]
    bodies = [body for path, body in calls if path.endswith("memory_occupation")]
    tags = [sorted(body["tags"]) for body in bodies]
    asleep, rest_of_it = sorted(RELEASED), sorted((KV_CACHE, CUDA_GRAPH))
    assert tags == [asleep, *[[WEIGHTS], rest_of_it, asleep] * 2]
    first = calls[1][1]
    assert first["sampling_params"]["max_new_tokens"] > 1  # a decode step runs the CUDA graphs
    pushed = [body for path, body in calls if path == update[len(begin)]]
    assert {len(body["serialized_named_tensors"]) for body in pushed} == {2}
    assert not any(body["flush_cache"] for body in pushed)
    check_start(calls[0][1], tmp_path)


def check_start(start: dict, folder: Path) -> None:
    """Compare what the server is started with."""
    environment, settings = start["environment"], start["args"]
    expected = {
        "CUDA_VISIBLE_DEVICES": "4,5",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "NCCL_GRAPH_REGISTER": "0",
        "TMS_RETAIN_CPU_BACKUP": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
    }
    assert expected.items() <= environment.items()
    refused = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "RANK", "SGLANG_USE_CPU_ENGINE"}
    refused.add("CUDA_DEVICE_MAX_CONNECTIONS")
    assert not refused & environment.keys()
    caches = [environment[name] for name in expected if name.endswith("CACHE_DIR")]
    assert not any(path.startswith(environment["TMPDIR"]) for path in caches)
    assert settings["skip_server_warmup"] is settings["enable_memory_saver"] is True


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_of_the_trainer_are_refused(name) -> None:
    check_allocator({name: "max_split_size_mb:64,expandable_segments:False"})
    with pytest.raises(InputError, match=f"^{name}=.*weight_sync=disk$"):
        check_allocator({name: f"max_split_size_mb:64, {EXPANDABLE}"})
