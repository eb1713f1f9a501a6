"""An RL loop by the unmodified Tinker SDK on the task of launch/recipes/smollm.yaml.

    TINKER_BASE_URL=http://127.0.0.1:8787 TINKER_API_KEY=tml-... \
        python -m benchmarks.tinker_smollm_loop --data runs/smollm/data --output sdk_run

It does what `mrl train` does with that recipe and LoRA: the prompts in the order of the file, GSPO with
the recipe's clip range, normalised advantages, one step of Adam for 64 answers. Nothing here is of mrl
but the reward. `benchmarks.tinker_smollm` runs it beside `mrl train`. With `--samples` it trains on the
samples of a run of `mrl train`, and draws none. Started again, it continues after its last step.

Dimensions: P prompts, G answers to a prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tinker
from tinker import types

from launch.recipes.last_number import reward

NUM_PROMPTS, GROUP, MAX_TOKENS = 8, 8, 24
HELD_OUT_GROUP = 4
CLIP = {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
"""GSPO's clip range in mrl (arXiv 2507.18071, section 5.1)."""
MIN_STD, EPS = 1e-3, 1e-4
"""`algorithm.min_group_std` and `algorithm.advantage_eps` of the recipe."""
Row = dict[str, Any]


class Scored(NamedTuple):
    """The tokens of a prompt and of an answer, the answer's log-probs, and its reward."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def sample(sampler: Any, tokenizer: Any, rows: list[Row], group: int, seed: int) -> list[Scored]:
    """Return `group` scored answers to each row's prompt; those of a prompt are neighbours."""
    futures_P = []
    for number, row in enumerate(rows):
        text = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )
        prompt = types.ModelInput.from_ints(tokenizer.encode(text, add_special_tokens=False))
        params = types.SamplingParams(
            max_tokens=MAX_TOKENS, seed=seed + number, stop=[tokenizer.eos_token_id]
        )
        futures_P.append((prompt.to_ints(), sampler.sample(prompt, group, params)))
    found = []
    for row, (prompt, future) in zip(rows, futures_P, strict=True):
        answers_G = future.result().sequences
        texts_G = [tokenizer.decode(a.tokens, skip_special_tokens=True) for a in answers_G]
        rewards_G = reward([], texts_G, answer=[row["answer"]] * group)
        found += [
            Scored(prompt, list(answer.tokens), list(answer.logprobs or []), value)
            for answer, value in zip(answers_G, rewards_G, strict=True)
        ]
    return found


def datum(scored: Scored, advantage: float, num_answers: int) -> types.Datum:
    """Return an answer as a datum; the loss is the mean over answers of the mean over their tokens."""
    prompt, answer = scored.prompt, scored.tokens
    tokens, pad = [*prompt, *answer], [0.0] * (len(prompt) - 1)
    share = advantage / (num_answers * len(answer))
    values = {
        "logprobs": scored.logprobs,
        "advantages": [share] * len(answer),
        "sequence_ratio_mask": [1.0] * len(answer),
    }
    arrays = {name: np.array([*pad, *each], np.float32) for name, each in values.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], np.int64), **arrays},
    )


def advantages(answers: list[Scored], group: int) -> list[float]:
    """Return GRPO's advantages: rewards minus the mean of their group, divided by its std."""
    found = []
    for first in range(0, len(answers), group):
        rewards_G = [each.reward for each in answers[first : first + group]]
        mean, spread = statistics.fmean(rewards_G), statistics.stdev(rewards_G)
        found += [(value - mean) / (max(spread, MIN_STD) + EPS) for value in rewards_G]
    return found


def sample_step(trainer: Any, tokenizer: Any, train: list[Row], step: int) -> list[Scored]:
    """Return the scored answers of a step."""
    first = step * NUM_PROMPTS
    rows = [train[i % len(train)] for i in range(first, first + NUM_PROMPTS)]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    return sample(sampler, tokenizer, rows, GROUP, first)


def train_step(trainer: Any, answers: list[Scored], step: int, lr: float, began: float) -> Row:
    """Train on the answers of a step; return its row of metrics, with the names of mrl's. `began`: when
    the step began, by `time.time`."""
    sampled = time.time()
    given = advantages(answers, GROUP)
    data = [datum(each, a, len(answers)) for each, a in zip(answers, given, strict=True)]
    passed = trainer.forward_backward(data, "gspo", CLIP)
    adam = types.AdamParams(learning_rate=lr, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)
    stepped = trainer.optim_step(adam).result()
    metrics = passed.result().metrics
    apart = [
        abs(theirs - ours)
        for each, output in zip(answers, passed.result().loss_fn_outputs, strict=True)
        for theirs, ours in zip(
            each.logprobs,
            output["logprobs"].data[-len(each.tokens) :],
            strict=True,
        )
    ]
    trained = time.time()
    lengths = [len(each.tokens) for each in answers]
    return {
        "step": step,
        "reward/mean": statistics.fmean(each.reward for each in answers),
        "response_len/mean": statistics.fmean(lengths),
        "tokens/rollout": sum(lengths),
        "tokens/train": sum(lengths) + sum(len(each.prompt) for each in answers),
        "loss/policy": metrics["loss:sum"],
        "grad_norm": stepped.metrics["unclipped_grad_l2:mean"],
        "mismatch/logprob_abs_mean": statistics.fmean(apart),
        "mismatch/logprob_abs_max": max(apart),
        "session/replayed_rows": metrics["session/replayed_rows:sum"],
        "session/native_rows": metrics["session/native_rows:sum"],
        "train/shared_tokens": metrics.get("train/shared_tokens:sum", 0.0),
        "time/rollout_s": sampled - began,
        "time/train_s": trained - sampled,
        "time/step_s": trained - began,
        "time/timestamp": trained,
    }


def evaluate(trainer: Any, tokenizer: Any, rows: list[Row]) -> dict[str, float]:
    """Return avg@4 of prompts, and its standard error over the prompts."""
    sampler = trainer.save_weights_and_get_sampling_client().result()
    answers = sample(sampler, tokenizer, rows, HELD_OUT_GROUP, 1_000_000)
    means_P = [
        statistics.fmean(each.reward for each in answers[first : first + HELD_OUT_GROUP])
        for first in range(0, len(answers), HELD_OUT_GROUP)
    ]
    stderr = statistics.stdev(means_P) / math.sqrt(len(means_P))
    return {"avg": statistics.fmean(means_P), "stderr": stderr}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train SmolLM2 by RL with the Tinker SDK.")
    parser.add_argument("--data", type=Path, required=True, help="folder of train and held_out")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--samples", type=Path, help="folder with a file of samples for each step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    log, before, after = (args.output / name for name in ("metrics.jsonl", "before", "after"))
    done = read_rows(log) if log.exists() else []
    train, held_out = (read_rows(args.data / f"{name}.jsonl") for name in ("train", "held_out"))
    (model,) = tinker.RestClient().get_server_capabilities().result().supported_models
    service = tinker.ServiceClient()
    if done:
        saved = done[-1]["state"]
        trainer = service.create_training_client_from_state_with_optimizer(saved).result()
    else:
        trainer = service.create_lora_training_client(
            model.model_name, rank=args.rank, seed=0, train_unembed=False
        ).result()
    tokenizer = trainer.get_tokenizer()
    if not before.exists():
        before.write_text(json.dumps(evaluate(trainer, tokenizer, held_out)))
    for step in range(len(done), args.steps):
        began = time.time()
        if args.samples is None:
            answers = sample_step(trainer, tokenizer, train, step)
        else:
            kept = read_rows(args.samples / f"{step:06d}.jsonl")
            answers = [Scored(**row) for row in kept]
        found = train_step(trainer, answers, step, args.lr, began)
        found["state"] = trainer.save_state(f"step-{step + 1}").result().path
        with log.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(
            f"step {step}: reward {found['reward/mean']:.3f}, {found['time/step_s']:.1f} s, "
            f"mismatch {found['mismatch/logprob_abs_max']:.1e}",
            flush=True,
        )
    after.write_text(json.dumps(evaluate(trainer, tokenizer, held_out)))
    service.close("success").result()


if __name__ == "__main__":
    main()
