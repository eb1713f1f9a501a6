"""This module measures how much of the weights a step leaves unchanged:
`python -m studies.weight_delta`.

Would it pay to send only the tensors that changed? A toy Qwen3-MoE takes GSPO steps at the learning
rate of real runs (1e-6, Adam, no weight decay) in float32 and in bfloat16 with float32 master weights.
Of what the trainer exports after each step: tensors, bytes and elements that are the same as after the
step before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.result import finish, summary, write_result
from moe.routes import Replay
from mrl.config import ModelConfig, OptimizerConfig
from parallel.hf_config import HfModel
from parallel.policy import Policy
from tests.parallel.conftest import make_samples, write_model
from tests.parallel.layouts import join_mesh, loss, ready_batch
from tests.ranks import run_ranks

MODEL = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
LR = 1e-6
LIMIT = 0.05
"""Share of the bytes above which it would pay to skip tensors that did not change."""
NUM_STEPS = 6


def measure(model: Path, dtype: Any) -> dict[str, Any]:
    """Return the medians over the steps; runs on the one rank."""
    mesh = join_mesh(model, {})
    policy = Policy(
        HfModel.read(model),
        mesh,
        ModelConfig(path=str(model), dtype=dtype),
        OptimizerConfig(lr=LR),
        recompute=False,
        temperature=1.0,
    )
    batch, _ = ready_batch(policy, mesh, make_samples())
    before, rows = _weights(policy), []
    for _ in range(NUM_STEPS):
        policy.train_step(batch, loss, Replay.rollout)
        after = _weights(policy)
        rows.append(_unchanged(before, after))
        before = after
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for bucket in policy.export(0, 64 << 20)
        for name, tensor in bucket.tensors
    }


def _unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the unchanged shares of tensors, of bytes in whole tensors, and of single elements."""
    same = [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
    elements = sum(int((tensor == before[name]).sum()) for name, tensor in after.items())
    total = sum(tensor.numel() for tensor in after.values())
    return {
        "tensors": len(same) / len(after),
        "bytes": sum(after[name].numel() for name in same) / total,
        "elements": elements / total,
    }


def main() -> None:
    """Measure both number formats."""
    argparse.ArgumentParser(description=summary(__doc__)).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model", **MODEL)
        for dtype in ("float32", "bfloat16"):
            found = run_ranks(1, measure, model, dtype, folder=Path(scratch) / dtype)[0]
            shares = {f"unchanged_{key}": round(share, 4) for key, share in found.items()}
            rows.append({"dtype": dtype, "lr": LR, **shares})
            print(json.dumps(rows[-1]), flush=True)
    failed = sum(row["unchanged_bytes"] > LIMIT for row in rows)
    passed = len(rows) - failed
    write_result(
        "weight_delta", {"limit": LIMIT, "rows": rows}, passed=passed, failed=failed,
        packages=("torch", "megatron-core"),
    )  # fmt: skip
    finish(passed, failed)


if __name__ == "__main__":
    main()
