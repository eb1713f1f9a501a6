"""This module compares mrl with its peers on a CPU: TRL's GRPO, generation by transformers, and an
earlier commit of mrl.

    make peers BENCH_ARGS="--before DIR"

Each measurement is a command of its own with one thread for each process, and the sides take turns.
Ratios are those of medians over all steps of all repeats, without the first step of a run. DIR is a
checkout of an earlier commit with its extension built (`python setup.py build_ext --inplace`).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.peer_runs.run import Outcome, Work, run_module, train_with_mrl
from mrl.toy_model import CHARACTERS, EOS, PAD, UNKNOWN, write_toy_model

TRL, GENERATE = "benchmarks.peer_runs.trl_run", "benchmarks.peer_runs.generate"
PACKAGES = ROOT / ".venv" / "peers"
ROLLOUT_ONLY = ("debug.rollout_only=true",)
DENSE = ("moe.routing_replay=off",)
PRETRAINED = ROOT / "runs" / "smollm"
"""The folder of `make smollm`, whose dense model and prompts a part uses."""
NO_EVALUATION = ("eval.every=0", "eval.sets=[]", "checkpoint.save_every=1000")
CONTEXT = 1024
RATIOS = ("step_s", "generate_s", "rest_s", "tokens_per_s", "start_s", "peak_bytes")
LAST = 5
"""The number of steps at the end of a run over which `last_rewards` is a mean."""
Side = Callable[[Work], Outcome]


@dataclass(frozen=True)
class Part:
    """One comparison: the work, and who does it besides mrl."""

    name: str
    tells: str
    work: Work
    peers: tuple[str, ...]
    """Of `trl`, `transformers` and `before`."""
    goals: tuple[tuple[str, str, float], ...] = ()
    """(figure, peer, bound): mrl's figure divided by the peer's is at most the bound."""
    only_by_name: bool = False
    """Whether it runs only with `--only`: it takes more than an hour."""


def write_models(folder: Path) -> tuple[str, str]:
    """Write the toy MoE, with room for long answers, and a dense model of SmolLM2-135M's sizes with
    random weights; return their folders."""
    toy, wide = folder / "toy", folder / "wide"
    write_toy_model(toy, max_position_embeddings=CONTEXT)
    tokenizer = wide_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "dtype": torch.float32,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).float().save_pretrained(wide)
    tokenizer.save_pretrained(wide)
    return str(toy), str(wide)


def wide_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 49,152 ordinary tokens. Its reserved tokens are not special ones, as in
    `build_tokenizer`, because loading 49,000 special tokens takes a minute."""
    known = [*CHARACTERS, PAD, EOS, UNKNOWN]
    vocab = {token: i for i, token in enumerate(known)}
    vocab |= {f"<|{i}|>": i for i in range(len(known), 49_152)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, unk_token=UNKNOWN
    )


def parts(toy: str, wide: str, *, quick: bool) -> list[Part]:
    """Return the comparisons; `quick` ones take few steps and prove nothing."""
    steps = 3 if quick else 11
    demo = Work(toy, steps, 16, 8, 32, 32, overrides=("train.micro_batch_tokens=8192",))
    few = 3 if quick else 6
    tail = Work(toy, few, 16, 8, 0, 512, overrides=("train.micro_batch_tokens=8192",))
    engine = replace(demo, overrides=(*demo.overrides, *ROLLOUT_ONLY))
    sums = Work(
        str(PRETRAINED / "dense"),
        3 if quick else 24,
        8,
        8,
        0,
        24,
        data=str(PRETRAINED / "data" / "train.jsonl"),
        recipe="launch/recipes/smollm.yaml",
        reward="launch.recipes.last_number:reward",
        lr=1e-5,
        overrides=NO_EVALUATION,
    )
    large = Work(wide, 3 if quick else 4, 8, 4, 32, 32, overrides=(*DENSE, *ROLLOUT_ONLY))
    return [
        Part("toy", "a step of the demo: 128 answers of 32 tokens", demo, ("trl", "before"),
             (("step_s", "trl", 1.5), ("generate_s", "before", 1 / 3))),
        Part("long tail", "answers of 1 to 512 tokens, 300 on average", tail, ("trl", "before"),
             (("step_s", "trl", 0.7),)),
        Part("SmolLM2", "the dense pretrained model: 64 answers of up to 24 tokens, of chat prompts",
             sums, ("trl",), (("step_s", "trl", 0.8),), only_by_name=True),
        Part("engine, toy", "generation alone, 128 answers of 32 tokens", engine,
             ("transformers", "before")),
        Part("engine, 135M", "generation alone, 32 answers of 32 tokens, 30 layers of width 576, "
             "vocabulary 49,152", large, ("transformers", "before")),
    ]  # fmt: skip


def choose(every: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Return the parts named in `only`; where it is empty, all that do not run only by name.

    Raises ValueError for a name that no part has.
    """
    names = [part.name for part in every]
    if unknown := sorted(set(only) - set(names)):
        raise ValueError(f"got {', '.join(unknown)}, expected some of {', '.join(names)}")
    return [part for part in every if part.name in only or not (only or part.only_by_name)]


def sides(part: Part, before: Path | None, packages: Path) -> dict[str, Side]:
    """Return mrl and those peers of a part that can run."""
    found: dict[str, Side] = {"mrl": train_with_mrl}
    if "trl" in part.peers:
        found["trl"] = functools.partial(run_module, TRL, packages=packages)
    if "transformers" in part.peers:
        found["transformers"] = functools.partial(run_module, GENERATE)
    if "before" in part.peers and before is not None:
        found["before"] = functools.partial(train_with_mrl, checkout=before)
    return found


def measure(work: Work, runners: dict[str, Side], repeats: int) -> dict[str, list[Outcome]]:
    """Run each side in turn, as often as `repeats`, with another seed each time."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in runners}
    for number in range(repeats):
        for name, run in runners.items():
            print(f"  {name}, {number + 1} of {repeats}", file=sys.stderr, flush=True)
            outcomes[name].append(run(replace(work, seed=number)))
    return outcomes


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the medians of one side over its steps and repeats."""

    def over_steps(name: str) -> float:
        return statistics.median(value for each in outcomes for value in getattr(each, name))

    return {
        **{name: over_steps(name) for name in ("step_s", "generate_s", "rest_s", "tokens_per_s")},
        "start_s": statistics.median(each.start_s for each in outcomes),
        "peak_bytes": statistics.median(each.peak_bytes for each in outcomes),
        "first_reward": statistics.fmean(each.rewards[0] for each in outcomes),
        "last_reward": statistics.fmean(each.rewards[-1] for each in outcomes),
        "last_rewards": statistics.fmean(x for each in outcomes for x in each.rewards[-LAST:]),
    }


def ratios(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return mrl's figures divided by those of each peer, of what is not 0."""
    return {
        peer: {n: found["mrl"][n] / theirs[n] for n in RATIOS if theirs[n] and found["mrl"][n]}
        for peer, theirs in found.items()
        if peer != "mrl"
    }


def judge(part: Part, found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return each goal whose peer ran, with the ratio and whether it was reached."""
    over = ratios(found)
    return [
        {"figure": figure, "peer": peer, "bound": bound, "ratio": over[peer][figure],
         "reached": over[peer][figure] <= bound}
        for figure, peer, bound in part.goals
        if peer in over
    ]  # fmt: skip


def show(part: Part, found: dict[str, dict[str, float]]) -> None:
    """Print the table of a part."""
    table = Table(title=f"{part.name}: {part.tells}", title_justify="left")
    names = ("step, s", "generation, s", "rest, s", "tokens/s", "start, s", "peak, GB", "reward")
    for column in ("", *names):
        table.add_column(column, justify="left" if not column else "right")
    for side, own in found.items():
        table.add_row(
            side, f"{own['step_s']:.3f}", f"{own['generate_s']:.3f}", f"{own['rest_s']:.3f}",
            f"{own['tokens_per_s']:,.0f}", f"{own['start_s']:.1f}", f"{own['peak_bytes'] / 1e9:.2f}",
            f"{own['first_reward']:.4f} -> {own['last_rewards']:.4f}",
        )  # fmt: skip
    for peer, over in ratios(found).items():
        cells = [f"{over[name]:.2f}" if name in over else "" for name in RATIOS]
        table.add_row(f"mrl / {peer}", *cells, "")
    Console(width=120).print(table)


def main() -> None:
    """Run the comparisons, print the tables and write runs/results/peers.json."""
    parser = argparse.ArgumentParser(prog="make peers", description=summary(__doc__))
    parser.add_argument(
        "--before", type=Path, help="checkout of an earlier commit, extension built"
    )
    parser.add_argument("--packages", type=Path, default=PACKAGES, help="folder with TRL")
    parser.add_argument("--only", action="append", default=[], help="name of a part")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few steps; writes no result")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, expected at least 1")
    if options.before is not None and not list(options.before.glob("mrl/_C*.so")):
        parser.error(f"--before: {options.before} has no mrl/_C*.so; build its extension there")
    if not (options.packages / "trl").is_dir():
        parser.error(f"--packages: {options.packages} has no TRL; run `make peers`")
    results, verdicts = {}, []
    with tempfile.TemporaryDirectory() as folder:
        try:
            chosen = choose(parts(*write_models(Path(folder)), quick=options.quick), options.only)
        except ValueError as error:
            parser.error(f"--only: {error}")
        for part in chosen:
            if not Path(part.work.model, "config.json").is_file():
                print(f"{part.name}: left out, because `make smollm` has made no model here")
                continue
            runners = sides(part, options.before, options.packages)
            outcomes = measure(part.work, runners, options.repeats)
            found = {name: figures(each) for name, each in outcomes.items()}
            show(part, found)
            goals = judge(part, found)
            verdicts += goals
            results[part.name] = {"tells": part.tells, "sides": found, "ratios": ratios(found),
                                  "goals": goals}  # fmt: skip
    for goal in verdicts:
        word = "reached" if goal["reached"] else "missed"
        print(f"{goal['figure']} over {goal['peer']}: {goal['ratio']:.2f}, at most "
              f"{goal['bound']:.2f}: {word}")  # fmt: skip
    passed = sum(goal["reached"] for goal in verdicts)
    missed = len(verdicts) - passed
    if not options.quick and not options.only:
        content = {"repeats": options.repeats, "parts": results}
        packages = ("torch", "transformers", "sglang", "megatron-core")
        write_result("peers", content, passed=passed, failed=0, missed=missed, packages=packages)
    finish(passed, 0, missed)


if __name__ == "__main__":
    main()
