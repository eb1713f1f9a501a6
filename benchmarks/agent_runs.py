"""This module trains a pretrained model for ten steps in environments from elsewhere:
`make smollm BENCH_ARGS="--only dense"` (makes the model), `make agents` (installs the packages), and
`python -m benchmarks.agent_runs`.

SmolLM2-135M trains in an environment of verifiers, with the tools of an MCP server, and by a shell
agent that calls the endpoint with curl; a toy model in a calculator task and a game, by agents that
use the openai package. A run that is on file is not repeated, and one that was interrupted goes on.

A run passes if all its steps are done, no episode was lost, and engine and trainer agree on the
log-probs of the sampled tokens, which they can do only if no text was tokenized again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.episode_runs.run import train
from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import between_markers, finish, summary, write_result
from mrl.toy_model import write_toy_model

PAGE, MARKER = ROOT / "docs/environments_elsewhere.md", "agent runs"
RECIPES = "launch/recipes/agents"
MISMATCH_LIMIT = 1e-3
"""Of the largest difference of a log-prob in fp32. Other tokens differ by 0.1 and more."""


@dataclass(frozen=True)
class Run:
    tells: str
    recipe: str
    keys: Sequence[str] = ()
    is_toy: bool = False


SIZES = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4")
RUNS = {
    "verifiers": Run("an environment of verifiers", f"{RECIPES}/verifiers_smollm.yaml"),
    "mcp": Run("the tools of an MCP server", f"{RECIPES}/mcp_smollm.yaml"),
    "shell": Run("a shell agent with curl", f"{RECIPES}/shell_smollm.yaml"),
    "calculator": Run("a calculator, openai package", f"{RECIPES}/calculator_toy.yaml",
                      SIZES, is_toy=True),
    "letter": Run("guess the letter, openai package", "launch/recipes/agent.yaml", SIZES,
                  is_toy=True),
}  # fmt: skip


def row_of(name: str, run: Run, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the table shows of a run."""
    return {
        "run": name,
        "tells": run.tells,
        "steps": len(metrics),
        "rewards": [row["reward/mean"] for row in metrics],
        "turns": [row["episode/num_turns"] for row in metrics],
        "lost": sum(int(row["reward/abstained"]) for row in metrics),
        "mismatch": max(row["mismatch/logprob_abs_max"] for row in metrics),
        "coverage": min((row.get("routing/replay_coverage", 1.0) for row in metrics), default=1.0),
        "seconds": [row["time/step_s"] for row in metrics],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="ten steps of each", title_justify="left")
    for column in ("run", "reward of each step", "turns", "lost", "mismatch", "s a step"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["tells"], " ".join(f"{reward:.2f}" for reward in row["rewards"]),
            f"{statistics.fmean(row['turns']):.1f}", str(row["lost"]),
            f"{row['mismatch']:.1e}", f"{statistics.fmean(row['seconds']):.0f}",
        )  # fmt: skip
    Console(width=130).print(table)


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the table of agent_runs.json."""
    lines = [
        "| run | reward of the steps | turns | episodes lost | largest mismatch | s a step |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["runs"]:
        rewards = ", ".join(f"{reward:.2f}" for reward in row["rewards"])
        turns, seconds = (statistics.fmean(row[key]) for key in ("turns", "seconds"))
        lines.append(
            f"| {row['tells']} | {rewards} | {turns:.1f} | {row['lost']} | {row['mismatch']:.1e} "
            f"| {seconds:.0f} |"
        )
    return {PAGE: between_markers(PAGE.read_text(), MARKER, "\n".join(lines))}


def main() -> None:
    """Run what is missing, print the table and write runs/results/agent_runs.json."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--runs", default=",".join(RUNS), help=f"some of {','.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "agents")
    options = parser.parse_args()
    if unknown := set(options.runs.split(",")) - set(RUNS):
        parser.error(f"--runs: got {sorted(unknown)}, expected some of {', '.join(RUNS)}")
    toy = options.work / "toy_model"
    if not toy.exists():
        write_toy_model(toy)
    rows = []
    for name in options.runs.split(","):
        run = RUNS[name]
        keys = [*run.keys, f"train.num_steps={options.steps}"]
        keys += [f"model.path={toy}"] if run.is_toy else []
        rows.append(row_of(name, run, train(run.recipe, options.work / name, keys)))
        show(rows[-1:])
    show(rows)
    passed = sum(
        row["steps"] == options.steps and row["lost"] == 0 and row["coverage"] == 1.0
        and row["mismatch"] < MISMATCH_LIMIT
        for row in rows
    )  # fmt: skip
    if set(options.runs.split(",")) == set(RUNS):  # only a whole run is written
        write_result("agent_runs", {"runs": rows}, passed=passed, failed=len(rows) - passed,
                     packages=("torch", "sglang", "transformers"))  # fmt: skip
    finish(passed, len(rows) - passed)


if __name__ == "__main__":
    main()
