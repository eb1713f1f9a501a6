"""Replaces NaN and infinity by null, as JSON has neither: so it is in every file of a run."""

from __future__ import annotations

import math
from typing import Any


def finite_or_null(value: Any) -> Any:
    """Return `value` with None for numbers that are not finite, also inside dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: finite_or_null(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
