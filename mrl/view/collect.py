"""Reads a run folder, to which the run may still be writing, as JSON-able data for the page.

The folder must have metrics.jsonl or config.yaml. If another file is missing, the page lacks the
part that would show the file. The page also shows `notes`, which say what had to be left out.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mrl.diagnosis.decomposition import read_decomposition
from mrl.errors import InputError
from mrl.run import rollout_rows
from mrl.system.json_text import is_number
from mrl.version import __version__
from mrl.view.facts import (
    OF_RUN,
    named_values,
    read_config,
    require_run,
    steps_in_words,
    value_of,
)
from mrl.view.outcome import (
    Totals,
    best_and_worst,
    figures,
    read_evaluations,
    with_evaluations,
)
from mrl.view.series import curves, notes_of, read_rows, short
from mrl.view.timeline import read_timeline
from mrl.view.units import units_of
from parallel.checkpoint.manifest import Damaged, candidates, read_manifest
from parallel.versions import installed_version

MAX_STEPS = 12
"""The page has samples of at most this many steps, unless `--steps` chooses the steps."""
MAX_SAMPLE_BYTES = 24_000_000
"""The largest number of bytes of all samples together. Browsers open a page of this size without
delay."""
PACKAGES = ("torch", "megatron-core", "sglang", "transformers")
WORST_BY = ("mismatch/logprob_abs_max", "mismatch/k3", "routing/disagreement", "grad_norm")
"""For each of these metrics, the page includes the samples of the step in which the metric is
largest."""


def collect(run: Path, steps: range | None, max_samples: int) -> dict[str, Any]:
    """Return everything that the page of a run shows.

    steps: the steps that the sample browser and the timeline show; None lets mrl choose.
    max_samples: the largest number of samples per step. Raises InputError if `run` is not a run
    folder, or if it has token records but none for a step in `steps`.
    """
    require_run(run)
    metrics, config = run / "metrics.jsonl", run / "config.yaml"
    rows, num_bad = read_rows(metrics)
    notes = [f"Lines of metrics.jsonl that could not be read: {num_bad}."] if num_bad else []
    recipe, config_text = read_config(config, notes)
    evaluations = read_evaluations(run, notes)
    drawn = curves(with_evaluations(rows, evaluations))
    notes += notes_of(drawn, "steps")
    packed = _read_samples(run, rows, steps, max_samples, notes)
    return {
        "folder": str(run),
        "summary": named_values(recipe, OF_RUN),
        "config": config_text,
        "figures": figures(Totals(rows), evaluations),
        "conversations": best_and_worst(run),
        "state": _state(rows, recipe, metrics),
        "versions": _versions(run, notes),
        "metrics": drawn | {"step": "step", "units": units_of(drawn["series"])},
        "timeline": read_timeline(run, rows, steps, value_of(recipe, "rollout.placement")),
        "diagnosis": _read_diagnosis(run, notes),
        "findings": _worst_and_last(packed),
        "steps": packed,
        "notes": notes,
    }


def choose_steps(recorded: Sequence[int], rows: Iterable[dict[str, Any]], limit: int) -> list[int]:
    """Choose at most `limit` of the steps with a token record, and return them in ascending order.

    Steps are chosen in this order until there are `limit` steps: first the last step, then the
    first step, then for each metric of WORST_BY the step in which this metric is largest, then
    evenly spaced steps.

    recorded: the steps with a token record, ascending. rows: the rows of metrics.jsonl.
    """
    known = set(recorded)
    rows = [row for row in rows if row["step"] in known]
    chosen = dict.fromkeys([*recorded[-1:], *recorded[:1]])
    for key in WORST_BY:
        held = [(row[key], row["step"]) for row in rows if short(row.get(key), 4) is not None]
        chosen |= dict.fromkeys([max(held)[1]] if held else [])
    spread = [recorded[i * len(recorded) // limit] for i in range(limit)] if recorded else []
    return sorted(list(dict.fromkeys([*chosen, *spread]))[:limit])


def _read_samples(
    run: Path,
    rows: list[dict[str, Any]],
    steps: range | None,
    max_samples: int,
    notes: list[str],
) -> list[dict[str, Any]]:
    """Return the data of the sample browser: one entry per step, with the step's packed samples
    (`pack_step`) and its `findings`, the first of which is the diagnosis.

    Raises InputError if there are token records, but none for a step in `steps`.
    """
    files = {_step_of(file): file for file in (run / "tokens").glob("step_*.safetensors")}
    recorded = sorted(files)
    if not recorded:
        notes.append("No token records (tokens/): the run was made with diagnosis.save_tokens_every=0, "
                     "or by an older mrl. The sample browser needs them.")  # fmt: skip
        return []
    if steps is None:
        wanted = choose_steps(recorded, rows, MAX_STEPS)
    else:
        wanted = [step for step in recorded if step in steps]
        if not wanted:
            raise InputError(
                f"--steps: {run}/tokens has no record of these steps; it has {len(recorded)}, from "
                f"step {recorded[0]} to {recorded[-1]}"
            )
    # They import torch, which the page of a run without token records does not need.
    from mrl.diagnosis.findings import find, usual_mismatch
    from mrl.diagnosis.tokens import load_tokens
    from mrl.view.samples import pack_step

    packed: list[dict[str, Any]] = []
    for step in wanted:
        try:
            record = load_tokens(files[step])
        except InputError as error:
            notes.append(f"Step {step}: {error}.")
            continue
        rollouts = _read_rollouts(run / "rollouts" / f"step_{step:06d}.jsonl", notes)
        share = MAX_SAMPLE_BYTES // len(wanted)
        findings = [
            {"name": found.name, "severity": short(found.severity, 2), "text": found.text}
            for found in find(record, usual_mismatch(rows, step))
        ]
        step_data = pack_step(record, rollouts, max_samples, share)
        packed.append(step_data | {"findings": findings})
    shown = sum(len(step["samples"]) for step in packed)
    everything = sum(step["num_samples"] for step in packed)
    notes.append(
        f"Samples of {len(packed)} of {len(recorded)} steps with a token record; {shown} of the "
        f"{everything} samples of these steps. Others: mrl view RUN --steps 10:20 --max-samples 64."
    )
    return packed


def _read_rollouts(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a step's rollouts; [] if the file is missing or damaged.

    No part of a damaged file is used, because samples are identified by their line numbers.
    """
    if not path.exists():
        return []
    try:
        return rollout_rows.read(path)
    except InputError as error:
        notes.append(f"The rollouts of a step are left out: {error}.")
        return []


def _read_diagnosis(run: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the contents of diagnosis/step_*.json, by ascending step. Damaged files are left out."""
    read = []
    for file in sorted((run / "diagnosis").glob("step_*.json")):
        try:
            read.append(_plain(read_decomposition(file)))
        except InputError as error:
            notes.append(f"A decomposition is left out: {error}.")
    return read


def _worst_and_last(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings for the top of the page.

    A step's first finding is its diagnosis. The result has the first two findings of the step with
    the most severe diagnosis, and the first two findings of the last step. The sample browser shows
    all findings of each step.
    """
    if not steps:
        return []
    worst = max(steps, key=lambda step: step["findings"][0]["severity"] or 0)
    shown = [worst] if worst is steps[-1] else [worst, steps[-1]]
    return [{"step": step["step"], **finding} for step in shown for finding in step["findings"][:2]]


def _state(rows: list[dict[str, Any]], recipe: dict[str, Any], metrics: Path) -> str:
    done, planned = rows[-1]["step"] + 1 if rows else 0, value_of(recipe, "train.num_steps")
    # Rows of an older mrl have no timestamp. The file's time then serves, though copying changes it.
    noted: Any = rows[-1].get("time/timestamp") if rows else None
    ended = float(noted) if is_number(noted) else metrics.stat().st_mtime if rows else None
    finished = "finished: " if rows and done == planned else ""
    return f"{finished}{steps_in_words(done, planned, ended)}"


def _versions(run: Path, notes: list[str]) -> list[tuple[str, str]]:
    """Return pairs (package name, version): first for the packages that made this page, then for
    the packages that made the run.

    The versions of the run are from the newest checkpoint whose manifest can be read. They are left
    out if there is no such checkpoint.
    """
    here = {"mrl": __version__, "python": platform.python_version()}
    here |= {name: installed_version(name) or "not installed" for name in PACKAGES}
    rows = [(name, version) for name, version in here.items()]
    for folder in candidates(run / "checkpoints"):
        try:
            versions = read_manifest(folder)["versions"]
        except (Damaged, InputError) as error:
            notes.append(f"Versions of {folder.name} are left out: {error}.")
            continue
        rows += [(f"{name} of the last checkpoint", each) for name, each in versions.items()]
        break
    return rows


def _plain(value: Any) -> Any:
    """Return `value` with numbers shortened, and NaN and infinity replaced by None, at any depth."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return short(value, 7) if isinstance(value, float) else value


def _step_of(file: Path) -> int:
    """Return the step of `step_000012.safetensors`; -1 for another name."""
    number = file.stem.removeprefix("step_")
    return int(number) if number.isascii() and number.isdigit() else -1
