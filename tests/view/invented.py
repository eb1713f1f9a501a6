"""A run folder made up for the page: every field filled, and texts that would like to be markup."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from mrl.diagnosis.tokens import TokenRecord, save_tokens

HOSTILE = (
    "</script ><img src=x onerror=\"document.title='owned'\">",
    "<!--<script >",
    "{{ 7 * 7 }}",
    "\u202edrawkcab\x07",
    "\ud800",
    "\n",
    "日本 <b>bold</b> &amp;",
)
LAYERS, EXPERTS, TOPK, TOKENS, PROMPT = 3, 8, 2, 24, 6


def write_run(folder: Path, num_steps: int = 5, num_samples: int = 4) -> Path:
    """A run of `num_steps` with token records of every step, a decomposition and hostile texts."""
    for name in ("tokens", "rollouts", "diagnosis"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"model:\n  path: {json.dumps(HOSTILE[0])}\ntrain:\n  num_steps: {num_steps}\n"
    )
    rows = [metrics(step) for step in range(num_steps)]
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"step": 99, "rew')
    for step in range(num_steps):
        save_tokens(folder / f"tokens/step_{step:06d}.safetensors", record(step, num_samples))
        samples = [rollout(i) for i in range(num_samples)]
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / f"rollouts/step_{step:06d}.jsonl").write_text(text)
    (folder / "diagnosis/step_000000.json").write_text(json.dumps(decomposition()))
    return folder


def metrics(step: int) -> dict[str, float | None]:
    row: dict[str, float | None] = {
        "step": step,
        "reward/mean": math.tanh(step / 3),
        "reward/std": 0.2,
        "grad_norm": None if step == 2 else 1.0 + step,
        "mismatch/k1": 1e-4 * step,
        "mismatch/k3": 1e-4 * (step + 1),
        "mismatch/chi2": 3e-4,
        "mismatch/logprob_abs_mean": 2e-3,
        "mismatch/logprob_abs_max": 0.5 if step == 3 else 0.1,
        "time/rollout_s": 3.0,
        "time/train_s": 1.0 + step,
        HOSTILE[0]: 1.0,
        "__proto__": 1.0,
    }
    for quantile, value in (("p50", 1e-3), ("p90", 1e-2), ("p99", 0.1), ("p999", 0.3)):
        row[f"mismatch/{quantile}"] = value * (step + 1)
    for layer in range(1, LAYERS + 1):
        row[f"routing/disagreement/layer_{layer:02d}"] = 0.01 * layer * step
        row[f"moe/load_entropy/layer_{layer:02d}"] = 1.0 - 0.1 * layer
    if step % 2:
        row["eval/own/pass@1"] = 0.5
    return row


def record(step: int, num_samples: int) -> TokenRecord:
    """Sample i has a difference of 0.1 (i + 1) at each token and 1.5 at token 10 of sample 1; layer 2
    routes token 8 of every sample otherwise."""
    count = num_samples * TOKENS
    generator = torch.Generator().manual_seed(step)
    ids = torch.arange(TOKENS).repeat(num_samples) % (len(HOSTILE) + 1)
    mask = (torch.arange(TOKENS) >= PROMPT).repeat(num_samples)
    d = torch.arange(1, num_samples + 1).repeat_interleave(TOKENS) * 0.1
    d[TOKENS + 10 : TOKENS + 11] = 1.5
    rollout = -torch.rand(count, generator=generator) * mask
    experts = torch.rand(count, LAYERS, EXPERTS, generator=generator).topk(TOPK).indices
    experts = experts.to(torch.int16)
    experts[TOKENS - 1 :: TOKENS] = -1
    native = experts.clone()
    native[:, 0] = native[:, 0].flip(-1)  # the same experts in another order: no difference
    native[8::TOKENS, 1] = torch.tensor([6, 7], dtype=torch.int16)
    experts[8::TOKENS, 1] = torch.tensor([0, 7], dtype=torch.int16)
    return TokenRecord(
        step=step,
        version=step,
        temperature=1.0,
        routing_replay="r3",
        layer_numbers=tuple(range(1, LAYERS + 1)),
        num_experts=EXPERTS,
        num_samples_of_step=num_samples,
        sample_ids=torch.arange(num_samples),
        cu_seqlens=torch.arange(num_samples + 1) * TOKENS,
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=rollout,
        old_logprobs=(rollout + d) * mask,
        entropy=torch.rand(count, generator=generator) * mask,
        advantages=torch.arange(num_samples).repeat_interleave(TOKENS) * 0.5 * mask,
        weight_versions=torch.where(mask, step, -1).int(),
        expert_ids=experts,
        native_ids=native,
        margins=torch.full((count, LAYERS), 0.25),
        pieces=dict(enumerate(HOSTILE)),
    )


def rollout(i: int) -> dict[str, object]:
    return {
        "group_id": i // 2,
        "prompt_id": str(i),
        "source": HOSTILE[0],
        "prompt": HOSTILE[1],
        "completion": HOSTILE[0],
        "reward": None if i == 3 else i / 2,
        "advantage": i * 0.5,
        "finish_reason": "stop",
    }


def decomposition() -> dict[str, object]:
    levels = {
        name: {"logprob_abs_mean": value, "k3": value / 10, "extreme_share": 0.0}
        for name, value in (
            ("none", 0.02),
            ("ids", 0.004),
            ("weights", 0.001),
            ("quantized", 0.0015),
        )
    }
    layers = [
        {"layer": n, "gap_without": 0.01 * n, "gap_first": None, "hidden_rel_diff": 1e-3 * n}
        for n in range(1, 4)
    ]
    found = {"step": 0, "num_tokens": 96, "levels": levels, "layers": layers}
    return found | {"first_divergent_layer": 2}
