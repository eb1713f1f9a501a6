"""SFT with LoRA: supervised steps train the adapter alone, and RL goes on from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.run.folder import RunFolder
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.lora.rules import is_adapter
from tests.loop.conftest import Toy
from tests.loop.test_guards import made_trainer
from tests.ranks import run_ranks


def sft_then_rl(overrides: list[str]) -> dict[str, Any]:
    """Train on this rank -> the loss of the rows before and after SFT, and whether the base moved."""
    trainer = made_trainer(overrides)
    policy, found = trainer.policy, {}
    rows = [example.token_ids for example in trainer.plan.sft_examples]
    before = {name: p.detach().clone() for name, p in policy.chunks[0].named_parameters()}
    begin = trainer._restore_or_run_sft

    def measured() -> None:
        found["before"] = loss()
        begin()
        found["after"] = loss()

    def loss() -> float:
        return -float(torch.cat(policy.sequence_logprobs(rows)).mean())

    trainer._restore_or_run_sft = measured
    trainer.train()
    moved = {n for n, p in policy.chunks[0].named_parameters() if not p.equal(before[n])}
    return found | {
        "base_moved": [name for name in moved if not is_adapter(name)],
        "adapter_moved": len(moved),
        "adapter": sum(map(is_adapter, before)),
    }


@pytest.mark.release
@pytest.mark.timeout(300)
def test_supervised_steps_train_the_adapter_and_rl_goes_on_from_it(
    toy: Toy, tmp_path: Path
) -> None:
    file, output = tmp_path / "sft.jsonl", tmp_path / "run"
    rows = [{"prompt": f"{letter}bcd", "completion": letter * 8} for letter in "abcdefgh"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = (f"sft.path={file}", "sft.num_steps=8", "sft.batch_size=8", "sft.lr=1e-2")
    lora = ("lora.rank=4", "lora.alpha=8", "lora.experts=per_expert", "algorithm.kl_coef=0.01")
    steps = ("train.num_steps=2", "checkpoint.save_every=1", "checkpoint.keep=3")
    overrides = toy.overrides(output, *sft, *lora, *steps)
    (found,) = run_ranks(1, sft_then_rl, overrides, folder=tmp_path / "out")
    assert found["after"] < 0.8 * found["before"]
    assert not found["base_moved"]
    assert found["adapter_moved"] == found["adapter"]

    saved = [SavedTensors(output / f"checkpoints/iter_000000{step}") for step in (0, 1)]
    name = "model.decoder.layers.0.self_attention.linear_qkv.lora.q_proj.B"
    assert saved[0][name].count_nonzero() > 0
    assert not saved[0][name].equal(saved[1][name])
    metrics = RunFolder(output).read_metrics()
    assert [row["weight_version"] for row in metrics] == [0, 1]
    assert max(row["mismatch/logprob_abs_max"] for row in metrics) < 1e-4
    assert metrics[0]["kl/ref"] > 0.01  # the reference is the base, without what SFT has taught
