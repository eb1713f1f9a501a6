"""Reads a resolved configuration, and formats the facts at the top of a page."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mrl.errors import InputError
from mrl.run.timeline import MAX_SECONDS

OF_RUN = (
    ("model", "model.path"),
    ("algorithm", "algorithm.name"),
    ("routing replay", "moe.routing_replay"),
    ("reward", "reward"),
    ("data", "data.path"),
    ("data", "data.sources"),
    ("prompts x samples", "rollout.prompts_per_step", "rollout.samples_per_prompt"),
    ("response tokens at most", "rollout.max_response_len"),
    ("temperature", "rollout.temperature"),
    ("learning rate", "optimizer.lr"),
    ("updates a rollout", "train.num_steps_per_rollout"),
    ("tensor x pipeline x expert x context", *(f"parallel.{kind}_parallel_size" for kind in (
        "tensor_model", "pipeline_model", "expert_model", "context"))),
    ("seed", "seed"),
)  # fmt: skip
"""The entries of the header of a run's page. Each is a name, followed by the recipe keys whose values
are shown."""


def require_run(folder: Path) -> None:
    """Raise InputError if `folder` is not a run folder, because it has neither metrics.jsonl nor
    config.yaml."""
    if (folder / "metrics.jsonl").exists() or (folder / "config.yaml").exists():
        return
    what = "is not a folder"
    if folder.is_dir():
        what = (
            "has neither metrics.jsonl nor config.yaml, as a run has, nor service.yaml and "
            "tenants, as a service has"
        )
    raise InputError(f"{folder} {what}; give the output_dir of a run or of a service")


def read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    """Return a resolved configuration as nested dicts, and the text of its file.

    If the file is missing or damaged, the dicts are empty and a note is appended to `notes`.
    """
    if not path.exists():
        notes.append(f"{path.name} is missing.")
        return {}, ""
    text = path.read_text(errors="replace")
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        notes.append(f"{path.name} holds no keys.")
    return tree if isinstance(tree, dict) else {}, text


def named_values(tree: dict[str, Any], wanted: Iterable[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Return a pair (name, text) for each tuple (name, keys...) in `wanted`. The text contains the
    values of these keys, joined by " x ".

    An entry is left out if `tree` has none of its keys.
    """
    rows = []
    for name, *keys in wanted:
        values = [value_of(tree, key) for key in keys]
        if any(value not in (None, []) for value in values):
            rows.append((name, " x ".join(map(_shown, values))))
    return rows


def value_of(tree: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if the key is missing."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def local_time(timestamp: float) -> str:
    """Format a time as local date, time and zone.

    timestamp: seconds since 1970. A time out of range becomes "an invalid time".
    """
    if not 0 <= timestamp < MAX_SECONDS:
        return "an invalid time"
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(timestamp))


def steps_in_words(done: int, planned: Any, ended: float | None) -> str:
    """Return how many steps are done, of how many, and when the last one ended (seconds since 1970)."""
    total = f" of {planned}" if isinstance(planned, int) else ""
    if not done:
        return f"no step{total} is done"
    return f"{done}{total} steps" + ("" if ended is None else f", the last at {local_time(ended)}")


def _shown(value: Any) -> str:
    """Format a value in one line. Data sources are shown by their paths, and None as "-"."""
    if isinstance(value, list):
        parts = [each.get("path") if isinstance(each, dict) else each for each in value]
        return ", ".join(map(_shown, parts))
    return "-" if value is None else str(value)
