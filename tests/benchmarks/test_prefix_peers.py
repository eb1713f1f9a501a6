"""benchmarks/prefix_peers.py compares steps that compute the same log-probs. No timings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import prefix_peers
from benchmarks.prefix_peers import Whole, compare
from benchmarks.shared_prefixes import Case, Steps
from moe.routes import Replay
from mrl.types import Sample
from parallel.dims import ParallelDims
from parallel.mesh import init_mesh
from tests.ranks import run_ranks

SIZES = {**prefix_peers.SIZES, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


def row(folder: Path) -> dict[str, Any]:
    prefix_peers.BUDGET = 64  # two samples in a micro-batch of `whole`
    mesh = init_mesh(ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1), seed=0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).float().save_pretrained(folder / "model")
    steps = Steps(folder / "model", mesh, replay=Replay.off)

    def ours(samples: list[Sample]) -> torch.Tensor:
        found = steps.step(samples, share=True)["logprobs"]
        return found[torch.cat([sample.loss_mask for sample in samples])]

    theirs = Whole(folder / "model").step
    return compare(
        {"off": theirs, "whole": theirs, "auto": ours}, Case("small", 20, 12, 4), turns=1
    )


def test_the_sides_agree(tmp_path: Path) -> None:
    (found,) = run_ranks(1, row, tmp_path, folder=tmp_path / "out")
    assert max(found["largest_logprob_difference"].values()) < 1e-5
    assert set(found["mrl_over"]) == {"whole"}
