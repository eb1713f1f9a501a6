"""This module tests whether router mismatch makes MoE RL collapse: `python -m studies.collapse`.

The engine's routers read their inputs with noise, so engine and trainer disagree in 1, 3 or 10% of the
choices (token, layer, expert) and in nothing else. docs/collapse.md has the question, the arms, the
criteria and what refutes the claim; it was written before any run.

    --model toy       16 layers, 8 of 64 experts: 7 arms, 3 rates, 5 seeds, and a control (default)
    --model smollm    SmolLM2-135M as a MoE: GRPO, R3 and GSPO at 10%, 2 seeds

A finished run is a line of FOLDER/results.jsonl: a study that was interrupted goes on where it was,
`--fresh` starts over. `--keep` runs nothing and writes the finished runs into a file of
benchmarks/results/, from which a clone on another machine continues. A whole study writes its result
and its curves into runs/results/, and `python -m benchmarks.evidence --record --only collapse` makes
them the committed ones and those of the page; `--report` runs nothing and writes them from the finished
runs, where a verdict without all its runs is "incomplete". A study with other seeds, steps, rates or
arms writes files of these names in FOLDER. The last line counts what must hold of the study itself,
whatever its answer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.evidence.catalog import target_of
from benchmarks.evidence.result import (
    NEW,
    between_markers,
    finish,
    provenance,
    summary,
    write_result,
)
from studies.collapse_study.arms import (
    ARMS,
    COLORS,
    MODELS,
    SFT,
    SHAPE,
    SMOLLM,
    UPCYCLE,
    Case,
    Model,
)
from studies.collapse_study.arms import cases as cases_of
from studies.collapse_study.calibrate import calibrated
from studies.collapse_study.criteria import WINDOW, Result, claim, of, verdicts
from studies.collapse_study.kept import continue_kept, digest_of, keep, kept
from studies.collapse_study.report import line_of, panels, rows_of, table, verdict_table
from studies.stability_study.arms import ROOT
from studies.stability_study.jobs import make_missing, open_results, read_lines
from studies.stability_study.plot import svg
from studies.stability_study.report import mean

DOCUMENT, PLOT = ROOT / "docs/collapse.md", ROOT / "docs/collapse.svg"
WORKER = "studies.collapse_study.worker"
CALIBRATED_ON = 32
"""Prompts of the rollout that the disturbance is calibrated on."""
NEAR = 0.5
"""How far, as a share of it, the rate of the first step may be from the one that was asked for."""


def settings_of(model: Model, num_steps: int) -> dict[str, Any]:
    """Return what the runs of a study have in common."""
    return {
        "model": model.name,
        "recipe": model.recipe.read_text(),
        "keys": model.keys,
        "arms": ARMS,
        "start": SHAPE if model.name == "toy" else (UPCYCLE, SFT),
        "num_steps": num_steps,
    }


def open_study(folder: Path, model: Model, num_steps: int, *, fresh: bool) -> None:
    """Open the folder of a study with these settings; make the model that its runs start from."""
    open_results(folder, settings_of(model, num_steps), fresh=fresh)
    if model.name == "smollm" and not (SMOLLM / "dense/config.json").is_file():
        sys.exit(f"error: there is no {SMOLLM.relative_to(ROOT)}/dense; make it with `make smollm`")
    if not (folder / "start").exists():
        print("making the start: a MoE and its supervised steps", flush=True)
        module = "studies.collapse_study.start"
        command = [sys.executable, "-W", "ignore", "-m", module, model.name, str(folder)]
        with (folder / "start.log").open("w") as log:
            subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)


def checks(results: Sequence[Result], wanted: Sequence[Case]) -> dict[str, bool]:
    """What must hold of the study: without it the verdicts say nothing."""
    first = [(r["rate"], r["steps"][0]["paired"]["routes"]["disagreement"])
             for r in results if r["steps"]]  # fmt: skip
    disturbed = [r for r in results if r["rate"] and r["steps"]]
    return {
        f"all {len(wanted)} runs were made": len(results) == len(wanted),
        "all runs of a model started from the same bits": len({r.get("start") for r in results})
        == 1,
        "each run's first step differs in the asked share of choices, to a half of it": all(
            abs(seen - rate) <= NEAR * rate + 1e-3 for rate, seen in first
        ),
        "on the same disturbed rollouts, k3 is smaller with replay than without": all(
            mean(r, "paired", "replayed", "k3") < mean(r, "paired", "native", "k3")
            for r in disturbed
        ),
    }


def write(
    results: Sequence[Result], model: Model, wanted: Sequence[Case], num_steps: int,
    scales: Mapping[float, float], folder: Path | None,
) -> dict[str, bool]:  # fmt: skip
    """Write the result and the plot: into runs/results/, or a smaller study's into `folder`."""
    num_seeds = len({case.seed for case in wanted})
    rows = rows_of(results, model)
    parts = {}
    if model.has_control:
        parts = verdicts(results, model.arms, model.rates, num_seeds)
    found = checks(results, wanted)
    content = {
        "num_steps": num_steps,
        "num_seeds": num_seeds,
        "scales": {str(rate): scale for rate, scale in scales.items()},
        "rows": rows,
        "claim": parts,
        "verdicts": found,
    }
    print(f"\n{table(rows)}\n")
    if model.has_control:
        content["whole_claim"] = claim(parts, max(model.rates))
        print(f"{verdict_table(parts, content['whole_claim'])}\n")
    write_result(
        model.result,
        content,
        passed=sum(found.values()),
        failed=len(found) - sum(found.values()),
        packages=("torch", "megatron-core", "sglang"),
        path=folder / f"{model.result}.json" if folder else None,
    )
    if model.has_control:
        (folder or NEW).joinpath(PLOT.name).write_text(svg(results, COLORS, panels(model)))
    return found


def report(
    results: Sequence[Result], model: Model, wanted: Sequence[Case], scales: Mapping[float, float],
    folder: Path | None,
) -> NoReturn:  # fmt: skip
    """Write the result as `write` does, print what must hold of the study, and exit."""
    found = write(results, model, wanted, model.num_steps, scales, folder)
    for text, holds in found.items():
        print(f"{'ok' if holds else 'FAILED'} {text}")
    finish(sum(found.values()), len(found) - sum(found.values()))


def pages(name: str, result: Mapping[str, Any]) -> dict[Path, str]:
    """Return the page with the tables of one of the study's results, and the plot of the toy's runs."""
    model = next(each for each in MODELS.values() if each.result == name)
    text = between_markers(DOCUMENT.read_text(), model.name, table(result["rows"]))
    if not model.has_control:
        return {DOCUMENT: text}
    verdict = verdict_table(result["claim"], result["whole_claim"])
    return {
        DOCUMENT: between_markers(text, "claim", verdict),
        PLOT: (NEW / PLOT.name).read_text(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--model", choices=MODELS, default="toy")
    parser.add_argument("--seeds", type=int, help="5; 2 for smollm")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, help="shares, such as 0.1")
    parser.add_argument("--folder", type=Path, help="runs/collapse[_smollm]")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of the folder")
    parser.add_argument("--keep", action="store_true", help="write the folder's runs for a commit")
    parser.add_argument("--report", action="store_true", help="write the result of the runs so far")
    arguments = parser.parse_args()
    whole = MODELS[arguments.model]
    model = replace(
        whole,
        num_seeds=arguments.seeds or whole.num_seeds,
        num_steps=arguments.steps or whole.num_steps,
        arms=tuple(arguments.arms or whole.arms),
        rates=whole.rates if arguments.rates is None else tuple(arguments.rates),
    )
    if model.num_steps < WINDOW:
        parser.error(f"--steps: got {model.num_steps}, expected at least {WINDOW}")
    if not all(0 < rate < 1 for rate in model.rates):
        parser.error(f"--rates: got {model.rates}, expected shares above 0 and below 1")
    folder = (arguments.folder or ROOT / "runs" / whole.result).absolute()
    if model.num_workers == 1:
        os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
    if arguments.keep:
        file = keep(folder, whole.result, settings_of(whole, whole.num_steps))
        print(f"written: {file.relative_to(ROOT)}")
        return
    if arguments.folder is None and not arguments.fresh:
        continue_kept(folder, model.result, settings_of(model, model.num_steps))
    wanted = cases_of(model, model.num_seeds)
    if arguments.report:
        study = kept(folder, settings_of(model, model.num_steps))
        scales = {float(rate): scale for rate, scale in study["calibration"]["scales"].items()}
        report(study["results"], model, wanted, scales, None if model == whole else folder)
    open_study(folder, model, model.num_steps, fresh=arguments.fresh)
    results = read_lines(folder / "results.jsonl")
    larger = replace(model, keys=(*model.keys, f"rollout.prompts_per_step={CALIBRATED_ON}"))
    first = Case("R3", 0.0, 0).job(larger, folder, model.num_steps, 0.0)
    scales = calibrated(folder, first, model.rates)
    missing = [
        case.job(model, folder, model.num_steps, scales[case.rate])
        for case in wanted
        if not any(r["seed"] == case.seed for r in of(results, case.arm, case.rate))
    ]
    options = {"num_workers": model.num_workers, "worker": WORKER}
    commit = provenance(target_of(model.result).measures)["commit"]
    origin = {"start": digest_of(folder / "start"), "commit": commit}
    failed = make_missing(
        folder, results, missing, line_of, timeout_s=model.run_timeout_s,
        more=origin, **options,
    )  # fmt: skip
    if not results:
        sys.exit("no run was made; 0 passed, 1 failed")
    report(results, model, wanted, scales, None if model == whole and not failed else folder)


if __name__ == "__main__":
    main()
