"""Reads a resolved configuration as the facts that stand at the top of a page."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from mrl.run.timeline import MAX_SECONDS


def read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    """Return the keys of a resolved configuration and its text; what is wrong with it joins `notes`."""
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
    """Return the name and the values in words of each (name, keys...) of which the tree has any."""
    rows = []
    for name, *keys in wanted:
        values = [value_of(tree, key) for key in keys]
        if any(value not in (None, []) for value in values):
            rows.append((name, " x ".join(map(_shown, values))))
    return rows


def value_of(tree: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None where it is not there."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def local_time(timestamp: float) -> str:
    """Return seconds since 1970 as date and time, with the zone; in words if they are not valid."""
    if not 0 <= timestamp < MAX_SECONDS:
        return "an invalid time"
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(timestamp))


def _shown(value: Any) -> str:
    """Return a value in one line; of sources of the data, their paths."""
    if isinstance(value, list):
        parts = [each.get("path") if isinstance(each, dict) else each for each in value]
        return ", ".join(map(_shown, parts))
    return "-" if value is None else str(value)
