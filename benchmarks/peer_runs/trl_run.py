"""Train with TRL's GRPOTrainer: `python -m benchmarks.peer_runs.trl_run WORK.json OUT.json`.

Needs the packages of requirements/trl.txt and requirements/peers.txt. Imports nothing of Megatron or
SGLang. One line of OUT for each step: seconds, seconds of generation, tokens of the completions
(without padding) and the mean reward.

A prompt is text or a list of chat messages; TRL renders messages with the tokenizer's template.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


class Times(TrainerCallback):
    """Notes the seconds of each optimizer step, with the generation before it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._begin = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.perf_counter() - self._begin)


def main() -> None:
    """Run the work of a file, and write what it took."""
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    rows: list[dict[str, float]] = []

    module, name = work["reward"].split(":")
    reward = getattr(importlib.import_module(module), name)

    def scored(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float | None]:
        """Score completions, which for prompts of messages are lists of one message each."""
        texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
        rewards = reward(prompts, texts, completion_ids=completion_ids, **columns)
        mean = sum(each or 0.0 for each in rewards) / len(rewards)
        rows.append({"tokens": sum(len(ids) for ids in completion_ids), "reward": mean})
        return rewards

    prompts = [json.loads(line) for line in Path(work["data"]).read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=work["num_steps"],
            per_device_train_batch_size=work["prompts"] * work["samples"] // work["accumulation"],
            gradient_accumulation_steps=work["accumulation"],
            num_generations=work["samples"],
            max_completion_length=work["max_tokens"],
            generation_kwargs={"min_new_tokens": work["min_tokens"]},
            learning_rate=work["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="grpo",  # with the sequence-level ratio: GSPO
            router_aux_loss_coef=0.0,
            importance_sampling_level="sequence",
            temperature=1.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            seed=work["seed"],
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
        )
        times = Times()
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(work["model"]),
            reward_funcs=scored,
            train_dataset=Dataset.from_list(prompts),
            args=config,
            callbacks=[times],
        )
        generate, seconds = trainer._generate, []

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = generate(*arguments, **options)
            seconds.append(time.perf_counter() - start)
            return result

        trainer._generate = timed
        started = time.time()
        trainer.train()
    steps = [
        {"step_s": step_s, "generate_s": generate_s, **row}
        for step_s, generate_s, row in zip(times.steps, seconds, rows, strict=True)
    ]
    first_s = started - float(os.environ["PEERS_STARTED"])
    Path(sys.argv[2]).write_text(json.dumps({"start_s": first_s, "steps": steps}))


if __name__ == "__main__":
    main()
