"""This module measures both ways of routes from SGLang:
`python -m benchmarks.route_memory [SHAPE ...]`.

Routes come through shared memory, or as base64 in JSON. One real server of one rank on a CPU for each
shape; the same requests by turns on both ways, medians of 5 after one of each that does not count. Long
prompts and few new tokens: many rows, little else.

CPU seconds are of the processes that the routes pass, as the kernel's scheduler counts them, a thousand
rows: the detokenizer, the HTTP server, this process. The scheduler's are mostly the model's and are
given for both ways, as is the wall-clock time of the whole call. Passes where both ways give the
same ids, every row takes the way that it should, and, above 1000 bytes of JSON a row, the three
processes take less CPU through memory.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.evidence.cases import run_cases
from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import EngineConfig, Request, SamplingParams
from mrl.engines.sglang import decode
from mrl.engines.sglang.engine import Engine
from mrl.toy_model import write_toy_model

SHAPES: dict[str, dict[str, Any]] = {
    "toy model": {"num_layers": 4},
    "48 layers x 8 of 128": {
        "num_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 16,
    },
}
NUM_REQUESTS, PROMPT_LEN, NEW_TOKENS, REPEATS = 12, 1000, 4, 5
PASSED = ("detokenizer", "HTTP server", "trainer")


def make_requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 96, (NUM_REQUESTS, PROMPT_LEN), generator=generator)
    sampling = SamplingParams(NEW_TOKENS, NEW_TOKENS)
    return [Request(f"r{i}", ids.clone(), i, sampling) for i, ids in enumerate(prompts)]


def processes(engine: Engine) -> dict[str, psutil.Process]:
    """Return the processes by what they do. SGLang names its own."""
    found = {"trainer": psutil.Process()}
    for process in engine.connection.process.tree():
        name = process.name()
        if name.startswith("sglang::"):
            found["detokenizer" if "detok" in name else "scheduler"] = process
        elif process.pid == engine.process_id:
            found["HTTP server"] = process
    return found


def run(engine: Engine, is_open: bool) -> dict[str, Any]:
    engine.core.routes.is_open = is_open
    who = processes(engine)
    before, read = (
        {name: cpu_s(process) for name, process in who.items()},
        engine.core.routes.num_bytes,
    )
    counted.clear()
    start = time.perf_counter()
    done = sorted(engine.endpoint.generate(make_requests()), key=lambda c: c.request_id)
    wall = time.perf_counter() - start
    time.sleep(0.3)  # the clean-up of the requests is theirs too
    return {
        "ids": [c.routing.expert_ids for c in done if c.routing is not None],
        "wall_s": wall,
        "cpu_s": {name: cpu_s(process) - before[name] for name, process in who.items()},
        "json_bytes": sum(counted),
        "memory_bytes": engine.core.routes.num_bytes - read,
    }


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of all threads of a process that are alive."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


counted: list[int] = []
"""Characters of routes in each answer."""


def count_payloads() -> None:
    original = decode.find_reference  # called with the routes of each answer

    def counting(payload: str) -> Any:
        counted.append(len(payload))
        return original(payload)

    decode.find_reference = counting


def measure(name: str, scratch: Path) -> dict[str, Any]:
    folder = scratch / name.replace(" ", "_")
    write_toy_model(folder, max_position_embeddings=2048, **SHAPES[name])
    engine = Engine(
        EngineConfig(
            model=ModelConfig(path=str(folder), dtype="float32"),
            rollout=RolloutConfig(
                max_response_len=NEW_TOKENS, start_timeout_s=300, max_total_tokens=16384
            ),
            log_path=folder / "engine.log",
        )
    )
    engine.start()
    try:
        runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for _ in range(REPEATS + 1):
            for is_open, done in runs.items():
                done.append(run(engine, is_open))
    finally:
        engine.stop()
    rows = sum(len(ids) for ids in runs[True][0]["ids"])
    same = all(
        torch.equal(a, b)
        for done in (*runs[True], *runs[False])
        for a, b in zip(done["ids"], runs[True][0]["ids"], strict=True)
    )
    ways = {"memory": of_way(runs[True][1:], rows), "base64": of_way(runs[False][1:], rows)}
    spent = {
        way: sum(figures["cpu_ms_per_1000_rows"][p] for p in PASSED)
        for way, figures in ways.items()
    }
    took = runs[True][1]["memory_bytes"] > 0 == runs[False][1]["memory_bytes"]
    is_large = ways["base64"]["json_bytes_per_row"] > 1000
    return {
        "shape": name,
        "rows": rows,
        "ways": ways,
        "cpu_of_base64_over_memory": round(spent["base64"] / max(spent["memory"], 1e-9), 2),
        "passed": same and took and (not is_large or spent["memory"] < spent["base64"]),
    }


def of_way(runs: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """Return the medians of the runs of one way, a row or a thousand rows."""
    return {
        "json_bytes_per_row": round(runs[0]["json_bytes"] / rows, 1),
        "memory_bytes_per_row": round(runs[0]["memory_bytes"] / rows, 1),
        "wall_s": round(statistics.median(r["wall_s"] for r in runs), 3),
        "cpu_ms_per_1000_rows": {
            name: round(1e6 * statistics.median(r["cpu_s"][name] for r in runs) / rows, 2)
            for name in runs[0]["cpu_s"]
        },
    }


def main() -> None:
    """Measure the shapes that the command line names."""
    count_payloads()
    run_cases(
        "route_memory", __doc__, SHAPES, measure, lambda row: row["passed"],
        packages=("torch", "sglang"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
