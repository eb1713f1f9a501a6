"""This module measures episodes that wait: `python -m benchmarks.episodes`.

slow: runs with free engines (one trainer rank, one engine) in which the environment takes 20 ms for
each answer, and the same runs with one prompt in 16 whose environment takes 50 times as long. They
are started in turn, and the throughput of the one divided by that of the other is reported. The limit
holds for `async.in_flight_updates: interrupt`. With `finish`, which is shown beside it, an engine takes
no new prompts until its slowest group has ended. Runs that are done are on file in --work, and the same
command continues after an interruption.

many: steps of 1,000 episodes that are all open at one time, none of which may be lost: as Python
classes in one worker process, and over the endpoint with the tools of an MCP server (needs
`make agents` for the package).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.episode_runs.run import train
from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import between_markers, finish, summary, write_result
from mrl.toy_model import write_toy_model

DOCUMENT = ROOT / "docs/environments.md"
GAME = "launch/recipes/multi_turn.yaml"
TOOLS = "launch/recipes/agents/mcp_toy.yaml"
ENVIRONMENT = "benchmarks/episode_runs/waiting_letters.py:Environment"
WAIT_S, SLOWNESS = 0.02, 50
SLOW_LIMIT = 0.10
"""The share of the throughput that the slow environment may cost."""
WARM_UP = 5
NUM_MANY = 1000
ASYNC = (
    *("rollout.placement=disaggregated", "rollout.num_ranks=1", "async.max_staleness=2"),
    "algorithm.importance=tis",
)
SCHEDULES = {
    "free engines, interrupt": (*ASYNC, "async.in_flight_updates=interrupt"),
    "free engines, finish": ASYNC,
}
"""With `finish`, an engine loads newer weights only when its slowest group has ended."""


def rows_file(path: Path, num_slow: int, num: int = 16) -> Path:
    rows = [{"prompt": "guess:", "slowness": SLOWNESS if n < num_slow else 1} for n in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def samples_per_s(metrics: list[dict[str, Any]], samples: int) -> float:
    """Return the throughput of a run of steps of so many samples, without its first steps."""
    measured = metrics[WARM_UP:]
    return samples * len(measured) / sum(row["time/step_s"] for row in measured)


def slow(work: Path, repeats: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for each schedule: the throughput with and without the slow environment."""
    rows = []
    common = (
        f"model.path={work / 'model'}",
        *(f"train.num_steps={steps}", "checkpoint.save_every=1000"),
        *(f"environment.name={ENVIRONMENT}", f"environment.arguments.wait_s={WAIT_S}"),
        "rollout.batch_invariant=false",
    )
    for schedule, keys in SCHEDULES.items():
        speeds: dict[int, list[float]] = {0: [], 1: []}
        for repeat in range(repeats):
            for num_slow, measured in speeds.items():
                data = rows_file(work / f"{num_slow}.jsonl", num_slow)
                name = f"{schedule.replace(', ', '_').replace(' ', '_')}_{num_slow}_{repeat}"
                file = work / f"{name}_{steps}.json"
                if not file.exists():
                    shutil.rmtree(work / name, ignore_errors=True)
                    given = (*common, f"data.path={data}", *keys)
                    speed = samples_per_s(train(GAME, work / name, given, 2), 16 * 8)
                    file.write_text(json.dumps(speed))
                measured.append(json.loads(file.read_text()))
                print(f"{schedule}, {num_slow} slow: {measured[-1]:.1f} samples/s", flush=True)
        without, with_slow = map(statistics.median, speeds.values())
        ratios = [one / none for none, one in zip(*speeds.values(), strict=True)]
        rows.append(
            {
                "schedule": schedule, "samples_per_s": without, "with_slow": with_slow,
                "ratio": statistics.median(ratios), "ratios": ratios,
            }
        )  # fmt: skip
    return rows


def many(work: Path) -> list[dict[str, Any]]:
    """Return a row for each kind of environment: how many of its episodes were lost."""
    sizes = (
        f"model.path={work / 'model'}",
        *(f"rollout.prompts_per_step={NUM_MANY // 8}", "rollout.samples_per_prompt=8"),
        *("train.num_steps=2", "checkpoint.save_every=1000"),
    )
    record = work / "open"
    game = (
        *(f"environment.name={ENVIRONMENT}", "environment.arguments.wait_s=0.5"),
        *(f"environment.arguments.record={record}", "environment.time_limit_s=120"),
        f"data.path={rows_file(work / 'many.jsonl', 0, NUM_MANY // 8)}",
        "rollout.batch_invariant=false",
    )
    tools = (
        *("sft=null", f"environment.num_agents={NUM_MANY}", "environment.episode_limit_s=1200"),
        *("environment.time_limit_s=120", "environment.python=.venv/verifiers/bin/python"),
    )
    rows = []
    for name, recipe, keys in (("Python class", GAME, game), ("MCP, endpoint", TOOLS, tools)):
        metrics = train(recipe, work / name.split()[0].strip(","), (*sizes, *keys))
        rows.append(
            {
                "environment": name,
                "episodes": NUM_MANY * len(metrics),
                "lost": sum(int(row["reward/abstained"]) for row in metrics),
                "seconds": [row["time/rollout_s"] for row in metrics],
            }
        )
        print(rows[-1], flush=True)
    rows[0]["most_open"] = int(record.read_text())
    return rows


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the tables of the result."""
    del name
    lines = [
        "| schedule | samples/s | with the slow environment | ratio |",
        "|---" * 4 + "|",
        *(
            f"| {row['schedule']} | {row['samples_per_s']:.1f} | {row['with_slow']:.1f} "
            f"| {row['ratio']:.2f} ({', '.join(f'{each:.2f}' for each in row['ratios'])}) |"
            for row in result["slow"]
        ),
        "",
        f"| {NUM_MANY:,} episodes at one time, two steps | lost | seconds of the rollouts |",
        "|---" * 3 + "|",
        *(
            f"| {row['environment']} | {row['lost']} | "
            f"{', '.join(f'{each:.0f}' for each in row['seconds'])} |"
            for row in result["many"]
        ),
    ]
    return {DOCUMENT: between_markers(DOCUMENT.read_text(), "episodes", "\n".join(lines))}


def show(slow_rows: list[dict[str, Any]], many_rows: list[dict[str, Any]]) -> None:
    table = Table(
        title=f"one environment of 16 takes {SLOWNESS} times as long", title_justify="left"
    )
    for column in ("schedule", "samples/s", "with the slow one", "ratio"):
        table.add_column(column)
    for row in slow_rows:
        table.add_row(row["schedule"], f"{row['samples_per_s']:.1f}",
                      f"{row['with_slow']:.1f}", f"{row['ratio']:.3f}")  # fmt: skip
    Console(width=120).print(table)
    table = Table(title=f"{NUM_MANY} episodes at one time", title_justify="left")
    for column in ("environment", "episodes", "lost", "seconds of the rollouts"):
        table.add_column(column)
    for row in many_rows:
        seconds = ", ".join(f"{each:.0f}" for each in row["seconds"])
        table.add_row(row["environment"], str(row["episodes"]), str(row["lost"]), seconds)
    Console(width=120).print(table)


def main() -> None:
    """Run both parts, print the tables and write runs/results/episodes.json."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "episodes")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps: got {options.steps}, expected more than {WARM_UP}")
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.absolute()
    if not (work / "model").exists():
        write_toy_model(work / "model")
    slow_rows = slow(work, options.repeats, options.steps)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        (Path(folder) / "model").symlink_to(work / "model")
        many_rows = many(Path(folder))
    show(slow_rows, many_rows)
    checks = [slow_rows[0]["ratio"] >= 1 - SLOW_LIMIT, many_rows[0]["most_open"] == NUM_MANY]
    checks += [row["lost"] == 0 and row["episodes"] == 2 * NUM_MANY for row in many_rows]
    passed = sum(checks)
    write_result("episodes", {"slow": slow_rows, "many": many_rows}, passed=passed,
                 failed=len(checks) - passed, packages=("torch", "sglang"))  # fmt: skip
    finish(passed, len(checks) - passed)


if __name__ == "__main__":
    main()
