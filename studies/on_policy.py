"""This module compares engine and trainer layer by layer and bit by bit:
`python -m studies.on_policy`.

A real SGLang server and the trainer's Megatron model get the same tokens, without and with
`rollout.true_on_policy`. For every op of every layer the table says, of the prompt's rows (one pass of
the engine) and of the generated ones (a pass each):

prompt, decode   rows that differ, largest difference, and that in units of the last place of the
                 row's largest element, after everything before it
own op           the same of all rows where the trainer's op is given what the engine's op before it
                 gave: its own difference

Then the causes one by one, batch and packing, the mismatch of four steps of `mrl train` in each mode
and under harder conditions, and what the mode costs in CPU seconds (medians, by turns). Passes where
everything is equal with the mode on. Only a whole run is written to the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.result import finish, summary, write_result
from mrl.toy_model import write_toy_model
from parallel.policy import Policy
from studies.on_policy_layers.causes import causes
from studies.on_policy_layers.compare import Difference, compare
from studies.on_policy_layers.cost import cost
from studies.on_policy_layers.engine_side import PROMPT_LEN, TEMPERATURE, EngineRun, run_engine
from studies.on_policy_layers.trainer_side import (
    Recorder,
    evaluate,
    join_mesh,
    make_policy,
    own_ops,
)
from tests.ranks import run_ranks

REPOSITORY = Path(__file__).parents[1]
OPS = (
    *("input norm", "qkv", "q norm", "k norm", "q rope", "k rope", "attention", "o_proj"),
    *("residual 1", "post norm", "router logits", "router ids", "router weights", "residual 2"),
)
NUM_STEPS = 4
HARD = ("rollout.temperature=0.7", "rollout.max_running_requests=7", "train.micro_batch_tokens=100",
        "moe.routing_replay=off")  # fmt: skip
"""Other batches in the engine, other packing in the trainer, and routers that decide for themselves."""
ODD: dict[str, Any] = {
    "hidden_size": 72,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 12,
    "num_experts_per_tok": 4,
}
"""Sizes that are no whole numbers of lanes, and a sum of four experts, whose order counts."""


def trainer_side(
    folder: Path, run: dict[str, Any], true_on_policy: bool
) -> dict[str, dict[str, Any]]:
    """Return the differences by op (prompt, decode, own op) and of whole sequences; runs on a rank."""
    engine = EngineRun(**run)
    policy = make_policy(folder, join_mesh(), true_on_policy)
    recorder = Recorder(policy)
    theirs, ids = engine.tensors, engine.token_ids
    [logprobs], _ = evaluate(policy, [(ids, PROMPT_LEN)])
    rows = {op: x[: len(ids) - 1] for op, x in recorder.tensors.items()}
    rows["logits"] = rows["logits"][PROMPT_LEN - 1 :]
    layers: dict[str, dict[str, Difference]] = {}
    [routers] = policy.runner.replays.values()
    routers.begin_forward(None, with_grad=False)  # they decide for themselves
    own = own_ops(recorder, theirs)
    routers.end_forward()
    for op in theirs:
        ours, engines = rows[op], theirs[op]
        first = 0 if op == "logits" else PROMPT_LEN
        layers[op] = {"decode": compare(ours[first:], engines[first:])}
        if first:
            layers[op]["prompt"] = compare(ours[:first], engines[:first])
        if op in own:
            layers[op]["own op"] = compare(own[op].reshape(engines.shape), engines)
    new = slice(PROMPT_LEN, None)
    layers["log-prob"] = {"decode": compare(logprobs[new], engine.logprobs[new])}
    others = [(i, prompt_len) for i, prompt_len, _, _ in engine.batch]
    whole = {
        "engine: a request alone against in a batch of 17": compare(
            engine.logprobs, engine.alone_in_batch
        ),
        "trainer: a sequence alone against packed with 16": compare(
            logprobs,
            evaluate(policy, [*others, (ids, PROMPT_LEN)])[0][-1],
        ),
        **_batch(policy, engine),
    }
    tables = {"layers": layers, "whole": {k: {"": v} for k, v in whole.items()}}
    return {
        name: {op: {k: asdict(d) for k, d in row.items()} for op, row in table.items()}
        for name, table in tables.items()
    }


def _batch(policy: Policy, engine: EngineRun) -> dict[str, Difference]:
    """Compare log-probs at the sampling temperature, and routes, of the sampled batch."""
    sequences = [(ids, prompt_len) for ids, prompt_len, _, _ in engine.batch]
    logprobs, routes = evaluate(policy, sequences, TEMPERATURE)
    ours = torch.cat([chosen[:-1] for chosen in routes])  # the last token never reached the engine
    theirs = torch.cat([chosen for *_, chosen in engine.batch])
    return {
        f"log-probs of a sampled batch, temperature {TEMPERATURE}": compare(
            torch.cat(logprobs), torch.cat([values for *_, values, _ in engine.batch])
        ),
        "routes of that batch": compare(ours.sort(-1).values, theirs.sort(-1).values),
    }


def measure(folder: Path, scratch: Path, true_on_policy: bool) -> dict[str, Any]:
    """Compare both sides in one mode and print the table."""
    engine = run_engine(folder, scratch / "engine", true_on_policy)
    [result] = run_ranks(
        1, trainer_side, folder, vars(engine), true_on_policy, folder=scratch / "rank"
    )
    print(f"\ntrue_on_policy: {'on' if true_on_policy else 'off'}")
    print(f"{'op':24}{'prompt':30}{'decode':30}own op")
    for op in sorted(result["layers"], key=_place):
        row = {k: Difference(**d) for k, d in result["layers"][op].items()}
        cells = [row[k].text() if k in row else "-" for k in ("prompt", "decode", "own op")]
        print(f"{op:24}{cells[0]:30}{cells[1]:30}{cells[2]}", flush=True)
    for what, row in result["whole"].items():
        print(f"{what}: {Difference(**row['']).text()}", flush=True)
    return result


def _place(op: str) -> tuple[int, int]:
    """Return a sort key: ops come in the order in which a token meets them."""
    layer, _, name = op.partition(" ")
    if layer.isdigit():
        return int(layer), OPS.index(name)
    ends = ("embedding", "final norm", "logits", "log-prob")
    return (-1, 0) if op == "embedding" else (1000, ends.index(op))


def train(folder: Path, output: Path, true_on_policy: bool, *more: str) -> list[dict[str, Any]]:
    """Train the toy recipe for a few steps and return its metrics."""
    command = [sys.executable, "-m", "mrl", "train", "launch/recipes/toy_moe.yaml"]
    settings = [
        f"model.path={folder}",
        f"output_dir={output}",
        f"train.num_steps={NUM_STEPS}",
        f"rollout.true_on_policy={str(true_on_policy).lower()}",
        *more,
    ]
    subprocess.run(
        [*command, *settings],
        cwd=REPOSITORY,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def live_runs(folder: Path, scratch: Path) -> dict[str, Any]:
    """Return the mismatch of whole runs."""
    write_toy_model(scratch / "odd_model", **ODD)
    runs = {
        "off": train(folder, scratch / "off", False),
        "on": train(folder, scratch / "on", True),
        "on, " + ", ".join(HARD): train(folder, scratch / "hard", True, *HARD),
        "on, 4 of 12 experts, odd sizes": train(scratch / "odd_model", scratch / "odd", True),
    }
    result: dict[str, Any] = {}
    for name, steps in runs.items():
        result[name] = {
            "tokens": int(sum(step["tokens/rollout"] for step in steps)),
            "logprob_abs_max": max(step["mismatch/logprob_abs_max"] for step in steps),
            "routing_disagreement": max(step.get("routing/disagreement") or 0.0 for step in steps),
        }
    return result


def failures(on: dict[str, Any], runs: dict[str, Any]) -> tuple[int, list[str]]:
    """Return how many equalities were checked with the mode on, and those that do not hold."""
    cells = [
        (f"{table}: {what} {column}".strip(), Difference(**cell).is_equal)
        for table in ("layers", "whole")
        for what, row in on[table].items()
        for column, cell in row.items()
    ]
    cells += [(cause.what, cause.mended.is_equal) for cause in causes() if cause.mended]
    cells += [
        (f"mrl train, {name}", run["logprob_abs_max"] == 0 and run["routing_disagreement"] == 0)
        for name, run in runs.items()
        if name.startswith("on")
    ]
    return len(cells), [what for what, ok in cells if not ok]


def main() -> None:
    """Measure both modes; `--no-runs` leaves out the runs and the cost, and writes nothing."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--no-runs", action="store_true", help="without `mrl train` and the cost")
    no_runs = parser.parse_args().no_runs
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_toy_model(scratch / "model")
        results = {
            mode: measure(scratch / "model", scratch / mode, mode == "on") for mode in ("off", "on")
        }
        print("\ncauses")
        for cause in causes():
            mended = f": {cause.mended.text()}" if cause.mended else ""
            print(f"{cause.what}: {cause.off.text()} -> {cause.mend}{mended}")
        runs = {} if no_runs else live_runs(scratch / "model", scratch)
        for what, value in runs.items():
            print(f"mrl train, {what}: {value}", flush=True)
        costs = cost(scratch / "model", scratch) if runs else {}
        print(json.dumps(costs))
    num, failed = failures(results["on"], runs)
    for what in failed:
        print(f"FAILED {what}")
    if runs:
        listed = [{**asdict(cause)} for cause in causes()]
        write_result(
            "on_policy",
            {**results, "causes": listed, "runs": runs, "cost": costs},
            passed=num - len(failed),
            failed=len(failed),
            packages=("torch", "sglang", "megatron-core"),
        )
    finish(num - len(failed), len(failed))


if __name__ == "__main__":
    main()
