"""This module holds the part of run.py that trains with shared prefixes, with and without by turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_lane.native_parts import one_process
from benchmarks.gpu_lane.parts import note
from benchmarks.shared_prefixes import SIZES, Case, Steps, compare
from mrl.toy_model import write_toy_model

SIZES_OF: dict[str, dict[str, Any]] = {
    "cpu": SIZES | {"num_layers": 2},
    "cuda": {
        "vocab_size": 8192, "num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 384, "max_position_embeddings": 4096, "init_std": 0.02,
    },
}  # fmt: skip
"""All layers are MoE, and positions suffice for the longest case."""
CASES = {
    "cuda": (Case("named", 2048, 256, 8), Case("even", 512, 512, 4, prompts=2)),
    "cpu": (Case("named", 512, 64, 8),),
}
PAIRS = {"cuda": 5, "cpu": 2}
LARGEST_GAP = {"float32": 1e-4, "bfloat16": 0.5}
"""Nats between the log-probs of a token with and without sharing. The orders of sums differ; in
bfloat16 random weights amplify that."""
LARGEST_LOSS_GAP = 1e-4


def prefixes(folder: Path, device: str) -> dict[str, Any]:
    """Loss, time and memory of steps with `train.share_prefixes` off and auto.

    On a GPU, attention of a micro-batch with shared rows goes through masked
    `scaled_dot_product_attention`, and that of one without through FlashAttention in bfloat16.
    """
    mesh = one_process()
    sizes, model = SIZES_OF[device], folder / "prefix_model"
    write_toy_model(model, **sizes)
    found: dict[str, list[dict[str, Any]]] = {}
    for dtype in ("float32", "bfloat16") if device == "cuda" else ("float32",):
        steps = Steps(model, mesh, dtype)  # pyright: ignore[reportArgumentType]
        found[dtype] = []
        for case in CASES[device]:
            row = compare(steps, case, PAIRS[device], sizes)
            found[dtype].append(row)
            note(**found)
            assert row["fewer_rows"] > 1, f"{case.name}: nothing was shared"
            gap = row["largest_logprob_difference"]
            assert gap <= LARGEST_GAP[dtype], f"{case.name} {dtype}: log-probs differ by {gap:.1e}"
            if dtype == "float32":
                loss = row["loss_difference"]
                assert loss <= LARGEST_LOSS_GAP, f"{case.name}: the losses differ by {loss:.1e}"
        del steps
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"says": "; ".join(in_words(dtype, row) for dtype in found for row in found[dtype])}


def in_words(dtype: str, row: dict[str, Any]) -> str:
    peaks = (row[arm]["peak_mb"] for arm in ("off", "auto"))
    before, after = (f"{peak:.0f}" for peak in peaks)
    speed = row["speed"]["wall_s"]
    return (
        f"{row['name']} {dtype}: {row['fewer_rows']:.2f} times fewer rows, {speed:.2f} times the "
        f"speed, {before} -> {after} MB"
    )
