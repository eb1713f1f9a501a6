"""Reads several run folders as JSON-able data for one page that compares them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.run.changes import flatten
from mrl.view.facts import read_config, require_run
from mrl.view.outcome import Totals, figures, read_evaluations, with_evaluations
from mrl.view.series import curves, notes_of, read_rows
from mrl.view.service import is_service
from mrl.view.units import units_of

MAX_RUNS = 8
"""The largest number of runs that can be compared: there are this many colours for curves."""
COMPARED = (
    r"reward/mean", r"eval/[^/]+/(avg|pass)@\d+", r"response_len/mean", r"response_len/truncated",
    r"entropy", r"mismatch/logprob_abs_mean", r"mismatch/logprob_abs_max", r"mismatch/k3",
    r"routing/disagreement", r"grad_norm", r"kl/ref", r"ratio/max", r"time/step_s",
    r"time/rollout_s", r"time/train_s", r"throughput/.+_tokens_per_s",
)  # fmt: skip
"""Patterns of the metrics that have a chart, in the order of the charts."""
UNCOMPARED = ("output_dir",)
"""Keys of the recipe that are not compared, because their values always differ between runs."""


def collect_comparison(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the data of the page that compares these runs.

    Raises InputError if a folder is given twice or is not a run folder, or if there are more than
    MAX_RUNS folders.
    """
    check_runs(folders)
    notes: list[str] = []
    names = names_of(folders)
    merged: dict[int, dict[str, Any]] = {}
    recipes, outcomes, keys = [], [], {}
    for number, (name, folder) in enumerate(zip(names, folders, strict=True)):
        require_run(folder)
        own: list[str] = []
        recipe, _ = read_config(folder / "config.yaml", own)
        rows, num_bad = read_rows(folder / "metrics.jsonl")
        if num_bad:
            own.append(f"Lines of metrics.jsonl that could not be read: {num_bad}.")
        evaluations = read_evaluations(folder, own)
        outcomes.append(figures(Totals(rows), evaluations))
        recipes.append(flat(recipe, own))
        for row in with_evaluations(rows, evaluations):
            target = merged.setdefault(row["step"], {"step": row["step"]})
            for key in row:
                if is_compared(key):
                    keys.setdefault(key, set()).add(number)
                    target[series_of(key, number)] = row[key]
        notes += [f"{name}: {note}" for note in own]
    drawn = curves([merged[step] for step in sorted(merged)])
    named = {
        series_of(key, number): f"{key} of {names[number]}" for key in keys for number in keys[key]
    }
    notes += notes_of(drawn | {"clipped": [named[series] for series in drawn["clipped"]]}, "steps")
    return {
        "folder": ", ".join(names),
        "state": f"{len(folders)} runs compared",
        "names": names,
        "outcomes": outcome_table(outcomes),
        "differences": differences_of(recipes),
        "metrics": drawn | {"step": "step", "units": units_of_charts(keys)},
        "charts": charts_of(keys, names),
        "notes": notes,
    }


def check_runs(folders: Sequence[Path]) -> None:
    """Raise InputError if these folders cannot be compared."""
    if len(folders) > MAX_RUNS:
        raise InputError(f"{len(folders)} runs: expected at most {MAX_RUNS}, one for each colour")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError("a run folder is given twice; give different ones")
    for folder in filter(is_service, folders):
        raise InputError(
            f"{folder} is the folder of a service; give the folders of its tenants' runs"
        )


@lru_cache(4096)
def is_compared(key: str) -> bool:
    """Return whether a metric has a chart."""
    return any(re.fullmatch(pattern, key) for pattern in COMPARED)


def charts_of(keys: Mapping[str, set[int]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one chart for each metric. keys: the numbers of the runs that have a metric."""
    order = [key for pattern in COMPARED for key in sorted(keys) if re.fullmatch(pattern, key)]
    return [
        {
            "title": key,
            "keys": [series_of(key, number) for number in sorted(keys[key])],
            "labels": [names[number] for number in sorted(keys[key])],
            "colours": sorted(keys[key]),
        }
        for key in order
    ]


def units_of_charts(keys: Mapping[str, set[int]]) -> dict[str, str]:
    """Return the unit of each curve."""
    units = units_of(keys)
    return {series_of(key, number): units[key] for key in keys for number in keys[key]}


def flat(recipe: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the values of a recipe by dotted key. If the recipe is nested too deeply (in YAML a
    mapping can contain itself), return {} and append a note to `notes`."""
    try:
        return flatten(recipe)
    except RecursionError:
        notes.append("config.yaml is nested too deeply.")
        return {}


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: the last part of its folder's path. If two runs would have the
    same name, return the whole path for every run."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def series_of(key: str, number: int) -> str:
    """Return the key of the curve that shows the metric `key` in run `number`. The result contains
    no space, because the page splits lists of keys at spaces."""
    return f"{key}#{number}"


def outcome_table(outcomes: Sequence[Any]) -> list[tuple[str, list[str]]]:
    """Return a pair (name, values) for each figure, a number at the top of a run's page. `values` has
    one string for each run: the figure's value in this run and, in parentheses, its detail. A dash
    replaces a missing figure."""
    order = dict.fromkeys(figure.name for each in outcomes for figure in each)
    found = [
        {figure.name: f"{figure.value} ({figure.detail})" for figure in each} for each in outcomes
    ]
    return [(name, [each.get(name, "\u2013") for each in found]) for name in order]


def differences_of(recipes: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return a pair (key, values) for each recipe key whose value differs between runs. `values`
    has the key's value in each run, as a string. A dash replaces a missing value."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [
        (key, ["\u2013" if key not in recipe else str(recipe[key]) for recipe in recipes])
        for key in keys
        if key not in UNCOMPARED
    ]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
