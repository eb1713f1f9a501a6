"""This module measures what it gains to train tenants at once on one service: `make tenants`.

Three tenants, which differ in their seeds, train the same number of steps on the toy model with real
Megatron and real SGLang, on two cores, synchronous and colocated: one after another, two at once and
three at once. One load has long-tailed answers. The other has answers of one length, with a KV cache
that one tenant alone fills: there is nothing for others to fill. The long-tailed load runs again with
the engine on a rank of its own, where it waits for the newest weights or runs a step ahead
(`benchmarks.tenants_split`). Medians over repeats, between which the order of the variants changes;
the start of the service is in no figure.

The sizes of the article are simulated (`benchmarks.tenants_model`), beside what it reports. Writes
runs/results/tenants.json; of a shorter study, tenants.json in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import between_markers, finish, summary, write_result
from benchmarks.tenants_engine import ASYNC, COLOCATED, SPLIT
from benchmarks.tenants_load import LOADS, ROOT
from benchmarks.tenants_model import ARTICLE, tenants_model
from benchmarks.tenants_split import MODES, SPREAD, rows_of_mode

NUM_CORES = 2
GOAL = 1.3
"""Steps per core-hour of three tenants at once, over those of one after another: the least."""
PAGE, MARKER = ROOT / "docs/tenants.md", "gains"
LIMIT_S = 900.0
NAMES = {"one": "one after another", "two": "two at once", "three": "three at once"}
SPLIT_TELLS = {
    "split": "the engine on a rank of its own, synchronous: it waits for the newest weights",
    "ahead": "the engine on a rank of its own, asynchronous: it runs one step ahead",
}
SIMULATED = (
    "The rows below are simulated: steps per GPU-hour against one tenant. Nothing of it has run on a "
    "GPU."
)


def ensure_start(work: Path) -> Path:
    """Return the model that all tenants adapt: the toy model after the supervised steps of
    long_tail.yaml, which teach it answers of very unequal length."""
    model = work / "start" / "long"
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.start_model", str(model)]
        recipe = ROOT / "launch/recipes/long_tail.yaml"
        subprocess.run([*command, f"{model}.sft", str(recipe)], check=True, cwd=ROOT)
    return model


def run_load(
    module: str, name: str, model: Path, work: Path, repeats: int, num_steps: int
) -> dict[str, Any]:
    """Run a load in a process of its own, and return what it wrote."""
    # Not below `work`: the paths of sockets are limited to 107 letters.
    with tempfile.TemporaryDirectory(prefix="mrl-tenants-") as scratch:
        command = [sys.executable, "-W", "ignore", "-m", module, str(model), scratch]
        process = subprocess.Popen([*command, name, str(repeats), str(num_steps)], cwd=ROOT)
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        for log in Path(scratch).glob(f"{name}/logs/*.log"):
            shutil.copy(log, work / f"{name}_{log.name}")
        if code:
            sys.exit(f"the load {name!r} ended with code {code}; see {work}; 0 passed, 1 failed")
        return json.loads((Path(scratch) / f"{name}.json").read_text())


def spread(values: Sequence[float]) -> list[float]:
    """Return median, least and most, to 4 digits."""
    found = (statistics.median(values), min(values), max(values))
    return [float(f"{value:.4g}") for value in found]


def rows_of(name: str, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each variant of a load: [median, least, most] over its repeats.

    `ratio` compares with the same tenants one after another, in the same repeat.
    """
    alone = {run["repeat"]: run["tenants"] for run in runs if run["variant"] == "one"}
    rows = []
    for variant in LOADS[name].variants:
        own = [run for run in runs if run["variant"] == variant]
        ratios = [
            sum(alone[run["repeat"]][each]["group_s"] for each in run["tenants"]) / run["wall_s"]
            for run in own
        ]
        figures = {
            "steps_per_core_hour": [r["num_steps"] * 3600 / NUM_CORES / r["wall_s"] for r in own],
            "ratio": ratios,
            **{key: [r[key] for r in own] for key in ("running", "occupancy", "occupancy_of_wall")},
            **{
                f"{key}_s_per_step": [r[f"{key}_s"] / r["num_steps"] for r in own]
                for key in ("rollout", "train", "sync", "score", "wall")
            },
            "swap_ms": [1000 * statistics.median(r["swap_s"]) for r in own],
        }
        row = {"load": name, "variant": variant, "repeats": len(own)}
        rows.append(row | {key: spread(values) for key, values in figures.items()})
    return rows


def is_one_digest(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each tenant has the same samples, adapter and optimizer state in all runs."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, tenant in run["tenants"].items():
            found.setdefault(name, set()).add(tenant["digest"])
    return bool(found) and all(len(digests) == 1 for digests in found.values())


def memory_of(places: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return where the bytes of each tenant were at the end of a round, as the ledger counts."""
    tenants: dict[str, dict[str, Any]] = {}
    for kind, bytes_of in places.items():
        name, _, part = kind.rpartition("/")
        name = name.partition("-")[0]
        row = tenants.setdefault(name or part, {"device": 0, "host": 0, "freed": 0, "parts": {}})
        for place, num_bytes in bytes_of.items():
            row[place] += num_bytes
        row["parts"][part] = sum(bytes_of.values())
    return [{"name": name, **row} for name, row in tenants.items()]


def waits_on_host(memory: Sequence[Mapping[str, Any]]) -> bool:
    """Whether exactly one tenant has bytes on the device, and all others lie on the host."""
    tenants = [row for row in memory if row["name"] != "base"]
    return len(tenants) == 3 and sum(row["device"] > 0 for row in tenants) <= 1


def checks_of(
    found: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    split: Mapping[str, Mapping[str, Any]],
    split_rows: Sequence[Mapping[str, Any]],
) -> dict[str, bool]:
    """Return whether each claim holds."""
    ratio = {row["load"]: row["ratio"][0] for row in rows if row["variant"] == "three"}
    checks = {
        f"long tail: three at once make {GOAL} times the steps per core-hour or more": (
            ratio["long_tail"] >= GOAL
        ),
        "saturated: three at once gain less than on the long tail": (
            ratio["saturated"] < ratio["long_tail"]
        ),
    }
    for row in split_rows:
        if row["variant"] == "three":
            checks[f"{row['mode']}: three at once make more steps per core-hour"] = (
                row["ratio"][0] > 1
            )
    for name, load in [*found.items(), *split.items()]:
        checks[f"{name}: each tenant has the same bits in all variants"] = is_one_digest(
            load["runs"]
        )
    memory = memory_of(found["long_tail"]["places"])
    checks["a tenant that does not train is on the host only"] = waits_on_host(memory)
    return checks


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(
        ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        + ["| " + " | ".join(line) + " |" for line in lines]
    )


def measured_table(result: Mapping[str, Any], load: str) -> str:
    def mid(row: Mapping[str, Any], key: str, form: str) -> str:
        return format(row[key][0], form)

    lines = [
        (
            NAMES[row["variant"]], mid(row, "steps_per_core_hour", ".0f"),
            "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"]), mid(row, "running", ".1f"),
            mid(row, "occupancy", ".0%"), mid(row, "occupancy_of_wall", ".0%"),
            mid(row, "rollout_s_per_step", ".2f"), mid(row, "train_s_per_step", ".2f"),
            mid(row, "sync_s_per_step", ".2f"),
        )
        for row in result["rows"]
        if row["load"] == load
    ]  # fmt: skip
    heads = ("tenants", "steps per core-hour", "ratio", "requests running", "engine full in rollout",
             "in all", "rollout s/step", "training s/step", "sync s/step")  # fmt: skip
    return table(heads, lines)


def split_table(rows: Sequence[Mapping[str, Any]], mode: str) -> str:
    """Return what was measured with the engine on a rank of its own."""
    lines = [
        (
            NAMES[row["variant"]],
            format(row["steps_per_core_hour"][0], ".0f"),
            "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"]),
            format(row["occupancy"][0], ".0%"),
        )
        for row in rows
        if row["mode"] == mode
    ]
    return table(("tenants", "steps per core-hour", "ratio", "engine full"), lines)


def model_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the simulation's gains against one tenant, and the article's."""
    sizes = sorted({row["num_gpus"] for row in rows})
    lines = []
    for mode in (SPLIT, COLOCATED, ASYNC):
        own = {
            (row["num_tenants"], row["num_gpus"]): row["ratio"] - 1
            for row in rows
            if row["mode"] == mode
        }
        name = mode if mode == ASYNC else f"{mode}, synchronous"
        for tenants in (2, 3):
            gains = [f"{own[tenants, int(size)]:+.0%}" for size in sizes]
            lines.append((f"{name} (simulated)", str(tenants), *gains))
    lines += [
        (f"the article reports, {mode}: {said}", "2, 3", *[""] * len(sizes))
        for mode, said in ARTICLE.items()
    ]
    return table(("arrangement", "tenants", *(f"{size:.0f} GPUs" for size in sizes)), lines)


def page_part(result: Mapping[str, Any]) -> str:
    """Return what stands between the markers of docs/tenants.md."""
    settings, swap = result["settings"], result["swap"]
    parts = [
        f"`make tenants` on two cores: {settings['steps']} steps of each tenant, medians of "
        f"{settings['repeats']} repeats; the ratio compares with the same tenants one after another."
    ]
    for name, load in LOADS.items():
        parts += [f"**{load.tells}**", measured_table(result, name)]
    for mode, tells in SPLIT_TELLS.items():
        parts += [f"**long-tailed answers, {tells}**", split_table(result["split"], mode)]
    parts.append(
        f"**A swap** takes {swap['median_ms']:.1f} ms in the median (at most {swap['max_ms']:.1f}) and "
        f"the service counts {swap['bytes_median']:,.0f} bytes. Where the bytes were after a round:"
    )
    lines = [
        (row["name"], *(f"{row[place]:,}" for place in ("device", "host", "freed")))
        for row in result["memory"]
    ]
    parts.append(table(("of", "bytes on the device", "on the host", "freed"), lines))
    return "\n\n".join([*parts, SIMULATED, model_table(result["model"])])


def swap_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what the swaps took where three tenants were there."""
    own = [run for run in runs if run["variant"] == "three"]
    seconds = [value for run in own for value in run["swap_s"]]
    num_bytes = [value for run in own for value in run["swap_bytes"]]
    return {
        "median_ms": round(1000 * statistics.median(seconds), 3),
        "max_ms": round(1000 * max(seconds), 3),
        "bytes_median": statistics.median(num_bytes),
        "bytes_max": max(num_bytes),
        "number": len(seconds),
    }


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the tables of tenants.json."""
    return {PAGE: between_markers(PAGE.read_text(), MARKER, page_part(result))}


def main() -> None:
    """Run both loads, write what was found, and exit with 1 where a check failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--work", type=Path, default=ROOT / "runs/tenants")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each tenant")
    parser.add_argument("--short", action="store_true", help="one repeat of 2 steps")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    repeats, steps = (1, 2) if options.short else (options.repeats, options.steps)
    work, start = options.work.absolute(), time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    model = ensure_start(work)
    sizes = (model, work, repeats, steps)
    found = {name: run_load("benchmarks.tenants_load", name, *sizes) for name in LOADS}
    rows = [row for name, load in found.items() for row in rows_of(name, load["runs"])]
    split = {mode: run_load("benchmarks.tenants_split", mode, *sizes) for mode in MODES}
    split_rows = [
        {**row, **{key: spread(row[key]) for key in SPREAD}}
        for mode, load in split.items()
        for row in rows_of_mode(mode, load["runs"], NUM_CORES)
    ]
    checks = checks_of(found, rows, split, split_rows)
    content = {
        "settings": {"cores": NUM_CORES, "repeats": repeats, "steps": steps},
        "rows": rows,
        "split": split_rows,
        "swap": swap_of(found["long_tail"]["runs"]),
        "memory": memory_of(found["long_tail"]["places"]),
        "answers": {name: load["runs"][0]["tenants"] for name, load in found.items()},
        "checks": checks,
        "model": tenants_model(num_steps=2 if options.short else 6)["rows"],
    }
    result = write_result(
        "tenants",
        content,
        passed=sum(checks.values()),
        failed=len(checks) - sum(checks.values()),
        packages=("torch", "megatron-core", "sglang"),
        path=work / "tenants.json" if options.short else None,
    )
    print(f"\n{page_part(result)}\n")
    for text, holds in checks.items():
        print(f"{'ok' if holds else 'FAILED'} {text}")
    print(f"{time.monotonic() - start:.0f} s in all")
    finish(sum(checks.values()), len(checks) - sum(checks.values()))


if __name__ == "__main__":
    main()
