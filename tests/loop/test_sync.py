"""Megatron trains, SGLang serves: after a sync both are the model that transformers would load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM

from mrl.config import load_recipe
from tests.loop.conftest import TOY_RECIPE, Toy
from tests.ranks import run_ranks

NUM_TOKENS = 24


def train_sync_generate(overrides: list[str]) -> dict[str, Any]:
    """Two real steps, then a sync of the trained weights and greedy tokens from the engine."""
    from mrl.collect.collector import Collector
    from mrl.collect.single_turn import SingleTurnRollout, start_groups
    from mrl.engine_pool.local import LocalPool
    from mrl.engines.sampling import SamplingParams
    from mrl.preflight import check
    from mrl.run.folder import RunFolder
    from mrl.trainer import Trainer
    from parallel.mesh import init_mesh

    recipe = load_recipe(TOY_RECIPE, overrides)
    plan = check(recipe, 1)
    folder = RunFolder(recipe.output_dir)
    folder.open(recipe)
    trainer = Trainer(plan, init_mesh(plan.dims, 0), folder)
    trainer.train()
    collector = trainer.collector
    assert isinstance(collector, Collector)
    assert isinstance(collector.pool, LocalPool)
    part = collector.pool.part
    engine = part.engine.server
    assert engine is not None
    assert part.endpoint is not None
    engine.start()
    try:
        engine.sleep()
        part.is_needed = part.engine.is_needed = True
        collector.sync(trainer.policy, 9)
        greedy = SamplingParams(NUM_TOKENS, NUM_TOKENS, temperature=0.0)
        rollout = SingleTurnRollout(start_groups(plan.prompts[:4], 1), greedy, 0)
        groups = list(rollout.finished(part.endpoint))
    finally:
        collector.close()
    buckets = trainer.policy.export(9, 1 << 20)
    return {
        "weights": {name: tensor.clone() for b in buckets for name, tensor in b.tensors},
        "versions": [g.samples[0].weight_versions[-1].version for g in groups],
        "prompts": [g.prompt.token_ids for g in groups],
        "greedy": [g.samples[0].response_ids for g in groups],
        "logprobs": [g.samples[0].rollout_logprobs[g.samples[0].prompt_len :] for g in groups],
    }


@pytest.mark.release
@pytest.mark.timeout(400)
def test_greedy_tokens_after_training_and_sync_equal_transformers(toy: Toy, tmp_path: Path) -> None:
    overrides = toy.overrides(tmp_path / "run", "train.num_steps=2")
    out = run_ranks(1, train_sync_generate, overrides, folder=tmp_path / "out")[0]
    exported = tmp_path / "exported"
    shutil.copytree(toy.model, exported)
    save_file(out["weights"], exported / "model.safetensors", metadata={"format": "pt"})
    model = Qwen3MoeForCausalLM.from_pretrained(exported, dtype=torch.float32)
    before = Qwen3MoeForCausalLM.from_pretrained(toy.model, dtype=torch.float32)
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert out["versions"] == [9, 9, 9, 9]
    for prompt, greedy, logprobs in zip(
        out["prompts"], out["greedy"], out["logprobs"], strict=True
    ):
        ids = torch.cat([prompt, greedy])
        with torch.no_grad():
            rows = model(ids.unsqueeze(0)).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert torch.equal(rows.argmax(-1), greedy)
        theirs = rows.gather(1, greedy.unsqueeze(1)).squeeze(1)
        assert (logprobs - theirs).abs().max() < 1e-5
