"""Reads a resolved configuration, and formats the facts at the top of a page."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mrl.run.timeline import MAX_SECONDS


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


def _shown(value: Any) -> str:
    """Format a value in one line. Data sources are shown by their paths, and None as "-"."""
    if isinstance(value, list):
        parts = [each.get("path") if isinstance(each, dict) else each for each in value]
        return ", ".join(map(_shown, parts))
    return "-" if value is None else str(value)
