"""This module measures what the weight export costs a rank:
`python -m benchmarks.export_memory [LAYOUT ...]`.

A Qwen3-MoE of about 100 MB of float32 weights, on gloo ranks of a CPU. For each layout: the bytes of
the largest shard, the most memory that an export takes beside it (the kernel's count of the process's
resident pages, so what gloo allocates is in it), in units of one bucket, and the time in units of one
copy of the whole model. The consumer keeps hold of a bucket until it has the next one, as an engine's
client does. In a process of its own: free pages of a used heap would be taken without being seen.
Only a run of every layout is written to the results.

Bound: three buckets, two buffers and what is gathered, where a bucket is at least as large as the
largest parameter (gloo copies what it gathers twice more inside, so on a CPU four times as large). The
engine maps the buffers or gets handles, so nothing comes on top. On a CPU a policy keeps the buffers
for its next export.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.evidence.cases import run_cases
from parallel.export import export_buckets
from tests.parallel.conftest import write_model
from tests.parallel.layouts import build, join_mesh
from tests.ranks import run_ranks

MODEL = {
    "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "moe_intermediate_size": 256,
    "num_experts": 16, "num_experts_per_tok": 2, "mlp_only_layers": [],
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "EP2": (2, {"expert": 2}),
    "TP2xPP2xEP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "TP2xPP2xEP2xETP2, DP2": (8, {"tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 2}),
}
BUCKET_BYTES = 8 << 20
M_MMAP_THRESHOLD = -3
"""mallopt's, from malloc.h."""


def peak_resident_bytes(run: Callable[[], object]) -> int:
    """Return the most resident memory of this process during `run` beyond what it had before
    (Linux).
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = _status("VmRSS")
    kept = run()
    peak = _status("VmHWM")
    del kept
    return peak - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def on_rank(model: Path, sizes: dict[str, Any], bucket_bytes: int) -> dict[str, float]:
    """Return the bytes and seconds of an export; runs on every rank."""
    # Freed tensors leave the process at once, and are not kept in a heap.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 64 << 10)
    policy = build(model, join_mesh(model, sizes))
    largest = 0

    def drain() -> list[Any]:
        nonlocal largest
        kept = None
        for bucket in policy.export(0, bucket_bytes):
            kept = bucket
            largest = max(largest, kept.num_bytes)
        return [kept]

    def export_into_new_memory() -> list[Any]:
        """The first export of a policy, which then keeps its buffer on a CPU."""
        kept = list(export_buckets(policy.weights, 0, bucket_bytes))[-1]
        return [kept]

    drain()
    dist.barrier()
    start = time.perf_counter()
    drain()
    seconds = time.perf_counter() - start
    total = sum(b.num_bytes for b in policy.export(0, bucket_bytes))
    whole = torch.ones(total, dtype=torch.uint8)
    target = torch.empty_like(whole).copy_(whole)
    start = time.perf_counter()
    target.copy_(whole)
    copy_seconds = time.perf_counter() - start
    shard = sum(e.parameter.numel() * e.parameter.element_size() for e in policy.weights.entries)
    return {
        "model_bytes": total,
        "shard_bytes": shard,
        "bucket_bytes": max(largest, bucket_bytes),
        "peak_bytes": peak_resident_bytes(export_into_new_memory),
        "seconds": seconds,
        "copy_seconds": copy_seconds,
    }


def measure(name: str, scratch: Path) -> dict[str, Any]:
    """Return the row of one layout: the worst of its ranks."""
    model = scratch / "model"
    if not model.exists():
        write_model(model, **MODEL)
    world, sizes = LAYOUTS[name]
    ranks = run_ranks(world, on_rank, model, sizes, BUCKET_BYTES, folder=scratch / "out")
    worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return {
        "layout": name,
        "ranks": world,
        "model_mb": round(worst["model_bytes"] / 1e6, 1),
        "largest_shard_mb": round(worst["shard_bytes"] / 1e6, 1),
        "bucket_mb": round(worst["bucket_bytes"] / 1e6, 1),
        "peak_in_buckets": round(worst["peak_bytes"] / worst["bucket_bytes"], 2),
        "time_in_copies": round(worst["seconds"] / worst["copy_seconds"], 1),
    }


def main() -> None:
    """Measure the layouts that the command line names."""
    run_cases(
        "export_memory", __doc__, LAYOUTS, measure, lambda row: row["peak_in_buckets"] <= 3,
        packages=("torch", "megatron-core"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
