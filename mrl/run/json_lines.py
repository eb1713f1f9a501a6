"""Writes JSON Lines. NaN and infinity become null in every file of a run, because JSON has neither."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from mrl.system.files import naming


def add_line(file: Path, row: dict[str, Any]) -> None:
    """Append a row to a file, as one line of JSON.

    Raises OSError if the line cannot be written. If only a part of the line was written, that part
    is removed again.
    """
    with naming(file), file.open("ab", buffering=0) as stream:
        end = stream.seek(0, os.SEEK_END)
        line = as_line(row).encode()
        try:
            while line:
                line = line[stream.write(line) :]
        except OSError:
            stream.truncate(end)
            raise


def as_line(row: dict[str, Any]) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(finite_or_null(row), ensure_ascii=False, allow_nan=False) + "\n"


def finite_or_null(value: Any) -> Any:
    """Return `value` with None instead of NaN and infinity, also inside dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: finite_or_null(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
