"""The files of evaluations, in the folder `evals/` of a run.

`step_000010.json` holds the metrics of the weights after 10 steps, and `step_000010.jsonl` the samples.
An evaluation with other settings than the run's is in a folder of its own, `evals/other_DIGEST/`, with
these settings in `settings.json`. No evaluation replaces another one: if the files are there with other
contents, they are first moved to `dropped_N/` next to them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mrl.run.aside import new_aside, set_aside
from mrl.run.changes import Kind, is_in, rule_of
from mrl.run.history import Update
from mrl.run.json_lines import as_line
from mrl.run.source import load_run
from mrl.system.files import write_whole

_SETTINGS = ("eval.sets", "rollout", "reward", "environment", "data.chat_template_kwargs")
"""The keys and branches of a recipe that an evaluation depends on."""


def evaluation_file(evals: Path, version: int) -> Path:
    """Return the path of an evaluation's metrics in the folder `evals`."""
    return evals / f"step_{version:06d}.json"


def write_evaluation(
    evals: Path, version: int, metrics: Mapping[str, float], lines: Iterable[bytes]
) -> None:
    """Write the metrics and the samples (`lines`) of an evaluation of weights of `version`.

    The samples are written first and the metrics last, so if the file with the metrics exists, the
    evaluation is complete. Several processes may call this at the same time for the same version.
    """
    evals.mkdir(exist_ok=True)  # not its parents: the run folder may have been moved
    file = evaluation_file(evals, version)
    contents = {
        file.with_suffix(".jsonl"): b"".join(lines),
        file: as_line({"step": version, **metrics}).encode(),
    }
    with (evals / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        earlier = [each for each in (file, file.with_suffix(".jsonl")) if each.exists()]
        if any(each.read_bytes() != contents[each] for each in earlier):
            aside = new_aside(evals)
            for each in earlier:  # the metrics first: what remains is then no complete evaluation
                each.rename(aside / each.name)
        for each, content in contents.items():
            write_whole(each, content)


def rewind_evaluations(evals: Path, step: int) -> None:
    """Set aside the evaluations of weights after `step` steps or more, whatever their settings."""
    for folder in (evals, *evals.glob("other_*")):
        set_aside(folder, step)


def other_settings(root: Path, update: Update) -> dict[str, Any]:
    """Return the settings of an evaluation that differ from those of the run in `root`, by key.

    The result is empty if the run's own recipe has no evaluation set, or if there is no run.
    `update` has the changes from the run's recipe to the recipe of the evaluation. If the value of a
    key is the same and only the contents of its files differ, their digest is in the result, too.
    """
    if not (root / "config.yaml").is_file() or not load_run(root).eval.sets:
        return {}
    return {
        change.key: [change.new, update.contents.get(change.key)]
        if change.old == change.new
        else change.new
        for change in update.changes
        if any(is_in(change.key, name) for name in _SETTINGS)
        and not change.is_moved
        and (is_in(change.key, "eval") or rule_of(change.key).kind is not Kind.FREE)
    }


def folder_of_settings(evals: Path, settings: Mapping[str, Any]) -> Path:
    """Make the folder for evaluations with `settings` (`other_settings`), and return its path."""
    text = json.dumps(settings, sort_keys=True, default=str)
    folder = evals / f"other_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "settings.json", json.dumps(settings, indent=2, default=str) + "\n")
    return folder
