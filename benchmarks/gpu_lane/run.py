"""A colocated engine and trainer on one GPU: `python -m benchmarks.gpu_lane.run [PART ...]`.

Each part is a process with a time limit, so that one that fails or hangs hides no other:

    sleep_wake   device memory asleep and awake over 50 cycles of level 2, and of level 1; the leak
    sync         bytes per second of a weight update through CUDA IPC, beside a copy on the device
    routes       tokens per second with and without captured routes, turn about
    train        `mrl train` of a toy MoE, a few steps, with its memory metrics

`--device cpu` runs the same code on a small model, to see that it runs; its figures mean nothing.
The last line is `N passed, N failed`; figures go to results/gpu_lane.json (`--output`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_bench.machine import describe

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gpu_lane.json"
TIME_LIMIT_S = {"sleep_wake": 140, "sync": 80, "routes": 110, "train": 120}
"""On a GPU; a busy CPU is given CPU_PATIENCE times as long."""
CPU_PATIENCE = 6
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "transformers", "megatron-core",
            "torch-memory-saver")  # fmt: skip
GPU_MODEL = {
    "vocab_size": 8192, "num_layers": 12, "hidden_size": 1024, "intermediate_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 384, "max_position_embeddings": 2048,
    "init_std": 0.02,
}  # fmt: skip
"""0.5 B parameters: 1.0 GB in bfloat16."""


def run_part(name: str, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """One part in a process of its own; what it found, or why it failed."""
    output = folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.gpu_lane.parts", name, "--device", device]
    command += ["--folder", str(folder), "--output", str(output)]
    log = folder / f"{name}.log"
    start = time.perf_counter()
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()  # the engine's server sees it and ends by itself
            process.wait()
    seconds = round(time.perf_counter() - start, 1)
    if code == 0 and output.is_file():
        return {"seconds": seconds, **json.loads(output.read_text())}
    why = f"over its limit of {limit_s:g} s" if code is None else f"exit code {code}"
    tail = log.read_text(errors="replace").splitlines()[-25:]
    print("\n".join([f"-- {name}: {why}; the end of its log:", *tail]))
    return {"seconds": seconds, "failed": why, "log_tail": tail[-5:]}


def write_model(folder: Path, device: str) -> None:
    from mrl.toy_model import write_toy_model

    write_toy_model(folder, **(GPU_MODEL if device == "cuda" else {}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(TIME_LIMIT_S))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="where the figures go")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(TIME_LIMIT_S):
        parser.error(f"unknown part {sorted(unknown)[0]!r}; expected {', '.join(TIME_LIMIT_S)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu runs the same code on a small model")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-lane-") as name:
        folder = Path(name)
        write_model(folder / "model", options.device)
        for part in options.parts or TIME_LIMIT_S:
            limit_s = TIME_LIMIT_S[part] * (CPU_PATIENCE if options.device == "cpu" else 1)
            results[part] = run_part(part, options.device, folder, limit_s)
            shown = {k: v for k, v in results[part].items() if k not in ("series", "log_tail")}
            print(f"{part}: {json.dumps(shown)}", flush=True)
    output = options.output or (RESULT if options.device == "cuda" else None)
    if output is not None:
        about = describe(torch.device(options.device), PACKAGES)
        output.write_text(json.dumps({**about, "parts": results}, indent=1) + "\n")
    failed = sum("failed" in result for result in results.values())
    print(f"{len(results) - failed} passed, {failed} failed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
