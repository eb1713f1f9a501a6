"""This module measures what quantised engines cost: `python -m studies.quantization [--model NAME]`.

A float32 trainer, and a bfloat16 engine whose weights are in one of several formats. For each format
the corrections none, truncated importance sampling, routing replay, and both, with several seeds. The
runs are those of `studies.stability`: they have the same start, and the same rollouts are compared
natively and along the engine's routes. `--model toy`, the default, is the toy MoE of the stability
study with all formats; `--model smollm` is SmolLM2-135M, dense and as a MoE, with fp8_block
(`studies.quantization_models`). A finished run is a line of FOLDER/.../results.jsonl; a study that was
interrupted continues where it was.

docs/quantization.md gets the table. The last line counts what must hold: every run ended; in the toy,
replay lowers k3 of the same rollouts in every format; and of SmolLM2, k3 is larger with quantised
weights than without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import between_markers, finish, summary, write_result
from studies.quantization_models import STUDIES, UPCYCLE, Model, Study, start_of
from studies.stability import open_folder
from studies.stability_study.arms import CORRECTIONS, ROOT, Job
from studies.stability_study.jobs import make_missing, open_results
from studies.stability_study.report import FIGURES, Result

DOCUMENT = ROOT / "docs/quantization.md"


def jobs(
    folder: Path, start: Path, model: Model, name: str, num_seeds: int, num_steps: int
) -> list[Job]:
    """Return the jobs of one model and format, seed after seed."""
    more = (*model.keys, f"rollout.quantization={name}")
    return [
        Job(
            arm,
            seed,
            num_steps,
            str(start),
            str(folder / "runs" / f"{arm}_{seed}"),
            (*CORRECTIONS[arm], *more),
            str(model.recipe),
            model.is_moe,
        )
        for seed in range(num_seeds)
        for arm in model.arms
    ]


def open_model(
    folder: Path, model: Model, name: str, num_steps: int
) -> tuple[Path, list[Result], Path]:
    """Return the folder of a model and format, the results that are on file there, and the folder of
    the model that runs start from."""
    if model.name == "toy":
        own = folder / name
        return own, open_folder(own, num_steps, fresh=False), own / "start"
    own = folder / model.name / name
    settings = {
        "recipe": model.recipe.read_text(),
        "keys": model.keys,
        "arms": {arm: CORRECTIONS[arm] for arm in model.arms},
        "upcycle": UPCYCLE if model.is_moe else (),
        "num_steps": num_steps,
    }
    return own, open_results(own, settings, fresh=False), start_of(model, own.parent)


def run_format(
    folder: Path, model: Model, name: str, study: Study, num_seeds: int, num_steps: int
) -> tuple[list[Result], int]:
    """Make the runs of a model and format that are missing. Return all its results, and how many runs
    failed."""
    folder, results, model_folder = open_model(folder, model, name, num_steps)
    there = {(result["arm"], result["seed"]) for result in results}
    every = jobs(folder, model_folder, model, name, num_seeds, num_steps)
    missing = [job for job in every if (job.arm, job.seed) not in there]

    def tell(result: Result) -> str:
        found = {key: FIGURES[key](result) for key in figures_of(model, study)}
        figures = ", ".join(f"{key} {value:.2g}" for key, value in found.items())
        return f"{model.name} {name} {result['arm']} seed {result['seed']}: {figures}"

    failed = make_missing(folder, results, missing, tell, num_workers=study.num_workers)
    return results, len(failed)


def figures_of(model: Model, study: Study) -> list[str]:
    """Return the figures that a model has: a dense one has no routes."""
    return [
        key for key in study.figures if model.is_moe or key not in ("replayed_k3", "disagreement")
    ]


def rows_of(
    model: Model, name: str, study: Study, results: Sequence[Result]
) -> list[dict[str, Any]]:
    """Return a row for each correction: (median, smallest, largest) over seeds of each figure."""
    rows = []
    for arm in model.arms:
        own = [result for result in results if result["arm"] == arm]
        columns = {
            key: [FIGURES[key](result) for result in own] for key in figures_of(model, study)
        }
        spreads = {k: (statistics.median(v), min(v), max(v)) for k, v in columns.items() if v}
        row = {"model": model.name, "quantization": name, "arm": arm, "num_runs": len(own)}
        rows.append(row | spreads)
    return rows


def table(rows: Sequence[dict[str, Any]], study: Study) -> str:
    """Return the rows as a table in Markdown. It names the models where there are several."""
    names = ("model",) * (len(study.models) > 1)
    header = (*names, "engine", "correction", *study.figures.values())
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in rows:
        spreads = [row.get(key) for key in study.figures]
        cells = ["-" if s is None else f"{s[0]:.2g} ({s[1]:.2g} to {s[2]:.2g})" for s in spreads]
        first = (*(row[name] for name in names), row["quantization"], row["arm"])
        lines.append(f"| {' | '.join((*first, *cells))} |")
    return "\n".join(lines)


def checks(rows: Sequence[dict[str, Any]], num_failed: int) -> dict[str, bool]:
    """Return what must hold, in words, and whether it does."""
    found = {"every run ended": not num_failed}
    by = {(row["model"], row["quantization"], row["arm"]): row for row in rows}
    for model, name in dict.fromkeys((model, name) for model, name, _ in by):
        own = [row for row in rows if (row["model"], row["quantization"]) == (model, name)]
        if model == "toy":
            found[f"{name}: replay lowers k3 of the same rollouts"] = all(
                row["replayed_k3"][0] < row["native_k3"][0] for row in own
            )
        elif name != "none" and (model, "none", own[0]["arm"]) in by:
            found[f"{model} {name}: k3 is larger than without quantisation"] = all(
                row["native_k3"][0] > by[model, "none", row["arm"]]["native_k3"][0] for row in own
            )
    return found


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the table of one of the study's results."""
    study = next(each for each in STUDIES.values() if each.result == name)
    text = table(result["rows"], study)
    return {DOCUMENT: between_markers(DOCUMENT.read_text(), study.marker, text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--model", choices=STUDIES, default="toy")
    names = [model.name for model in STUDIES["smollm"].models]
    parser.add_argument("--only", nargs="+", choices=names, help="of --model smollm")
    parser.add_argument("--seeds", type=int, help="5; 2 for smollm")
    parser.add_argument("--steps", type=int, help="10; 4 for smollm")
    parser.add_argument("--formats", nargs="+", choices=STUDIES["toy"].formats)
    parser.add_argument("--folder", type=Path, help="runs/quantization[_smollm]")
    arguments = parser.parse_args()
    study = STUDIES[arguments.model]
    models = [model for model in study.models if model.name in (arguments.only or [model.name])]
    formats = tuple(arguments.formats or study.formats)
    num_seeds = arguments.seeds or study.num_seeds
    num_steps = arguments.steps or study.num_steps
    folder = (arguments.folder or ROOT / "runs" / study.result).absolute()
    if not models:
        parser.error("--only needs --model smollm")
    if study.num_workers == 1:
        os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    rows: list[dict[str, Any]] = []
    num_failed = 0
    for model in models:
        for name in formats:
            results, failed = run_format(folder, model, name, study, num_seeds, num_steps)
            num_failed += failed
            rows += rows_of(model, name, study, results) if results else []
    if not rows or not all(row["num_runs"] for row in rows):
        sys.exit("a correction has no run; 0 passed, 1 failed")
    found = checks(rows, num_failed)
    is_whole = (num_seeds, num_steps) == (study.num_seeds, study.num_steps) and not num_failed
    is_whole &= set(formats) == set(study.formats) and len(models) == len(study.models)
    write_result(
        study.result,
        {"num_steps": num_steps, "num_seeds": num_seeds, "rows": rows, "verdicts": found},
        passed=sum(found.values()),
        failed=len(found) - sum(found.values()),
        packages=("torch", "megatron-core", "sglang"),
        path=None if is_whole else folder / f"{study.result}.json",
    )
    print(f"\n{table(rows, study)}\n")
    for words, holds in found.items():
        print(f"{'ok' if holds else 'FAILED'} {words}")
    finish(sum(found.values()), len(found) - sum(found.values()))


if __name__ == "__main__":
    main()
