"""Options that users of other frameworks look for."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.loop.conftest import REPOSITORY
from tests.users.things import User, thing


@thing("I let the learning rate decay along a cosine to a lowest value.")
def decay_the_learning_rate(user: User) -> str:
    keys = ("optimizer.lr_decay_style=cosine", "optimizer.min_lr=1e-3", "train.num_steps=3")
    user.train("run", *keys, "train.num_steps_per_rollout=1")
    lines = (user.folder / "run/metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    assert rates == pytest.approx([3e-3, 2.5e-3, 1.5e-3]), rates
    return f"lr {rates}"


@thing("I end answers at a text, sample from the 20 likeliest tokens, and evaluate without both.")
def stop_at_a_text(user: User) -> str:
    rows = [json.dumps({"prompt": "write: a", "answer": "a"})] * 2
    sets = f"[{{name: a, path: {user.write('a.jsonl', chr(10).join(rows))}, top_k: -1, stop: []}}]"
    keys = ("rollout.stop=[z,J,p,E]", "rollout.top_k=20", "train.num_steps=2", "eval.every=2")
    user.train("run", *keys, f"eval.sets={sets}")
    rollouts = (user.folder / "run/rollouts").glob("step_*.jsonl")
    texts = [
        json.loads(line)["completion"] for f in rollouts for line in f.read_text().splitlines()
    ]
    ended = [text for text in texts if set(text) & set("zJpE")]
    assert ended, texts
    assert not any(set(text[:-1]) & set("zJpE") for text in ended), ended
    return f"{len(ended)} of {len(texts)} completions end with one of the texts"


@thing("I truncate with top_p and top_k, and both sides compute log-probs over what was kept.")
def train_on_truncated_samples(user: User) -> str:
    cut = ("rollout.top_p=0.1", "rollout.sampling_mask=true", "train.num_steps=2")
    printed = user.mrl("check", *user.recipe("run"), *cut, code=2)
    assert "rollout.top_k is -1, but rollout.sampling_mask needs 2 to 4096" in printed
    gaps = {}
    for name, mask in (("truncated", "true"), ("whole", "false")):
        user.train(name, *cut, "rollout.top_k=8", f"rollout.sampling_mask={mask}")
        first = json.loads((user.folder / name / "metrics.jsonl").read_text().splitlines()[0])
        gaps[name] = first["mismatch/logprob_abs_max"]
        assert first["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert max(gaps.values()) < 1e-5, gaps
    return f"largest difference of engine and trainer: {gaps}"


@thing("I write bf16, and then fp16, as the dtype.", is_long=False)
def name_a_dtype(user: User) -> str:
    user.mrl("check", *user.recipe("run"), "model.dtype=bf16")
    printed = user.mrl("check", *user.recipe("run"), "model.dtype=fp16", code=2)
    assert "use bfloat16 (bf16) or float32 (fp32)" in printed
    return printed.strip()


@thing("I add an entropy bonus, and the policy stays broader than without.")
def keep_the_policy_broad(user: User) -> str:
    ends = {}
    for coef in (0, 1):
        user.train(f"run_{coef}", f"algorithm.entropy_coef={coef}", "train.num_steps=4")
        lines = (user.folder / f"run_{coef}/metrics.jsonl").read_text().splitlines()
        ends[coef] = json.loads(lines[-1])["entropy"]
    assert ends[1] > ends[0], ends
    return f"entropy after 3 steps: {ends[0]:.3f} without, {ends[1]:.3f} with"


@thing("I train for an epoch and a half, and take each rollout twice.")
def train_for_epochs(user: User) -> str:
    rows = [json.dumps({"prompt": f"write: {letter}", "answer": letter}) for letter in "abcdefgh"]
    data = f"data.path={user.write('eight.jsonl', chr(10).join(rows))}"
    epochs = ("train.num_steps=0", "train.num_epochs=1.5", "algorithm.name=grpo", data)
    moves = "algorithm.entropy_coef=1"  # also where no reward differs
    ratios = {}
    for passes in (1, 2):
        user.train(f"run_{passes}", *epochs, moves, f"train.num_epochs_per_rollout={passes}")
        lines = (user.folder / f"run_{passes}/metrics.jsonl").read_text().splitlines()
        assert len(lines) == 3  # of 4 prompts each
        ratios[passes] = json.loads(lines[0])["ratio/max"]
    config = (user.folder / "run_1/config.yaml").read_text()
    assert "num_steps: 3\n" in config
    assert ratios[1] == pytest.approx(1, abs=1e-5)
    assert ratios[2] > 1.001
    printed = user.mrl("check", *user.recipe("other"), "train.num_epochs=2", code=2)
    assert "give one of them" in printed
    return (
        f"3 steps; largest ratio of the first step {ratios[1]:.4f}, with two passes {ratios[2]:.4f}"
    )


@thing("I take the engine's log-probs as the old ones, and the trainer makes no pass for them.")
def use_the_engines_logprobs(user: User) -> str:
    keys = ("algorithm.old_logprobs=rollout", "diagnosis.save_tokens_every=0")
    printed = user.mrl("check", *user.recipe("no"), *keys, "algorithm.name=gspo", code=2)
    assert "times the range" in printed
    more = ("diagnosis.decompose_every=0", "algorithm.name=grpo", "train.num_steps=2")
    user.train("run", *keys, *more)
    first = json.loads((user.folder / "run/metrics.jsonl").read_text().splitlines()[0])
    assert "time/logprob_s" not in first
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-3)
    return printed.strip()


@thing("I plan a run that does not fit, and am told to keep Adam in host memory.")
def plan_adam_on_the_cpu(user: User) -> str:
    config = user.write("model/config.json", "")
    shutil.copy(REPOSITORY / "benchmarks/models/qwen3_30b_a3b.json", config)
    recipe = REPOSITORY / "launch/recipes/qwen3_30b_a3b_8x80gb.yaml"
    plan = (
        "check",
        recipe,
        f"model.path={config.parent}",
        "--plan",
        "--gpus",
        "8",
        "--gpu",
        "h100",
    )
    printed = user.mrl(*plan, "megatron.optimizer_offload_fraction=0.1", code=2)
    advice = "megatron.optimizer_cpu_offload=true with optimizer_offload_fraction=1"
    assert advice in printed
    assert "fits: the peak is" in user.mrl(*plan, "megatron.optimizer_offload_fraction=1")
    return printed[printed.index("what helps most") :].strip()
