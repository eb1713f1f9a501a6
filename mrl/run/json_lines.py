"""JSON has no NaN and no infinity: null stands for them in every file of a run."""

from __future__ import annotations

import math
from typing import Any


def finite_or_null(value: Any) -> Any:
    """`value` with None for numbers that are not finite, also inside of dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: finite_or_null(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
