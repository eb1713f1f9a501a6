"""This module compares rollouts through mrl with a bare SGLang server:
`python -m benchmarks.throughput`.

The same load, prompts of random tokens with log-probs and routes, is put on three servers of the same
model, turn about: by SGLang's own benchmark client (`sglang.bench_serving`, not streaming, all requests
at once) on two that mrl does not control, and by mrl's engine on mrl's server, up to whole sample
groups. On a CPU a bare server needs one line of mrl's plugin all the same, or it could not return
routes (see mrl/engines/sglang/plugins/cpu). One of the two bare servers also has mrl's CPU layers: the
goal compares with it, so it measures the cost of mrl's sampling, requests and decoding, and not the
gain of the layers. Ratios are mrl's tokens per second over another's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.evidence.result import finish, summary, write_result
from mrl.collect.single_turn import SingleTurnRollout, start_groups
from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import EngineConfig, SamplingParams
from mrl.engines.sglang.connection import ServerConnection
from mrl.engines.sglang.engine import Engine
from mrl.engines.sglang.settings import CPU_STUBS
from mrl.toy_model import write_toy_model
from mrl.types import Prompt

NUM_REQUESTS, PROMPT_LEN, RESPONSE_LEN = 128, 32, 64
NUM_ROUNDS = 7
GOAL = 0.95
LAYERS = "layers"
BARE = {"bare": ("bare_plugin",), LAYERS: ("bare_plugin", "mrl_cpu_layers")}
"""The plugins of each server that mrl does not control."""
BARE_PLUGIN = """
import mrl_sglang_cpu


def register():
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = mrl_sglang_cpu.allocate_unpinned
"""


def bare_stubs(folder: Path, plugins: Sequence[str]) -> Path:
    """Copy mrl's stand-ins for missing packages, with these plugins; bare_plugin only makes room for
    routes."""
    shutil.copytree(CPU_STUBS, folder)
    (folder / "bare_plugin.py").write_text(BARE_PLUGIN)
    lines = [f"{plugin} = {plugin}:register\n" for plugin in plugins]
    for points in folder.glob("*.dist-info/entry_points.txt"):
        points.write_text("".join(["[sglang.srt.plugins]\n", *lines]))
    return folder


@contextmanager
def bare_server(engine: Engine, folder: Path, plugins: Sequence[str]) -> Iterator[ServerConnection]:
    """Start SGLang with the same arguments, without anything of mrl's in how it samples."""
    ours = engine.connection.process
    arguments = {k: v for k, v in ours.server_args.items() if k != "api_key"}
    environment = dict(ours.environment)
    folder.mkdir()
    environment["PYTHONPATH"] = str(bare_stubs(folder / "stubs", plugins))
    server = ServerConnection(arguments, environment, folder / "bare.log")
    server.start(600.0, {})
    try:
        yield server
    finally:
        server.stop()


def by_the_client(server: ServerConnection, model: Path, folder: Path, seed: int) -> float:
    """Return the output tokens per second that `sglang.bench_serving` reports."""
    output = folder / f"client_{seed}.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--base-url", f"http://127.0.0.1:{server.process.port}", "--model", str(model)),
        *("--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1.0"),
        *("--random-input-len", str(PROMPT_LEN), "--random-output-len", str(RESPONSE_LEN)),
        *("--num-prompts", str(NUM_REQUESTS), "--temperature", "1.0", "--seed", str(seed)),
        *("--return-logprob", "--return-routed-experts", "--disable-stream", "--disable-tqdm"),
        *("--warmup-requests", "0", "--flush-cache", "--output-file", str(output)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [server.process.environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
        ),
        "OPENAI_API_KEY": server._api_key,
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode or not output.exists():
        raise SystemExit(
            f"throughput: the client failed: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    report = json.loads(output.read_text().splitlines()[-1])
    if report["completed"] != NUM_REQUESTS:
        raise SystemExit(f"throughput: the client completed {report['completed']} requests")
    return report["output_throughput"]


def by_mrl(engine: Engine, seed: int) -> float:
    """Return the output tokens per second of one rollout, decoded into sample groups."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (NUM_REQUESTS, PROMPT_LEN), generator=generator)
    prompts = [Prompt(str(i), row, "", {}, f"random:{i}") for i, row in enumerate(ids)]
    start = time.perf_counter()
    sampling = SamplingParams(RESPONSE_LEN, RESPONSE_LEN)
    groups = list(
        SingleTurnRollout(start_groups(prompts, 1), sampling, seed).finished(engine.endpoint)
    )
    seconds = time.perf_counter() - start
    return sum(len(s.response_ids) for g in groups for s in g.samples) / seconds


def main() -> None:
    """Measure NUM_ROUNDS turns of both."""
    argparse.ArgumentParser(description=summary(__doc__)).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = folder / "model"
        write_toy_model(model)
        config = RolloutConfig(max_response_len=RESPONSE_LEN)
        model_config = ModelConfig(path=str(model))
        engine = Engine(EngineConfig(model_config, config, folder / "engine.log"))
        engine.start()
        try:
            with ExitStack() as stack:
                bare = {
                    name: stack.enter_context(bare_server(engine, folder / name, plugins))
                    for name, plugins in BARE.items()
                }
                rows = []
                for seed in range(NUM_ROUNDS + 1):
                    row = {
                        name: by_the_client(server, model, folder / name, seed)
                        for name, server in bare.items()
                    }
                    row["mrl"] = by_mrl(engine, seed)
                    rows.append(row)
                    print(", ".join(f"{name} {rate:.0f}" for name, rate in row.items()), "tokens/s")
        finally:
            engine.stop()
    rows = rows[1:]  # the first round warms up
    ratios = {name: statistics.median(row["mrl"] / row[name] for row in rows) for name in BARE}
    content = {
        "load": f"{NUM_REQUESTS} requests, {PROMPT_LEN} tokens in, {RESPONSE_LEN} out, with log-probs "
        "and routes, toy model, one rank",
        "rounds": rows,
        "median_ratio": ratios,
        "goal": GOAL,
    }
    passed = int(ratios[LAYERS] >= GOAL)
    packages = ("torch", "sglang", "transformers")
    write_result("throughput", content, passed=passed, failed=1 - passed, packages=packages)
    told = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in ratios.items())
    print(f"median ratios: {told}; goal {GOAL} of {LAYERS}")
    finish(passed, 1 - passed)


if __name__ == "__main__":
    main()
