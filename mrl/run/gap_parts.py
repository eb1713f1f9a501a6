"""Splits the gap between engine and trainer by cause, from the levels of a decomposition.

A level is a pass of the trainer, and has the gap that remains in it (`mrl.diagnosis.decompose`).
"""

from __future__ import annotations

from collections.abc import Mapping

Levels = Mapping[str, Mapping[str, float | None]]
"""For each level, its measures by name; a number that was not finite is None."""
LEVELS = {
    "none": "no replay",
    "ids": "replay of expert ids",
    "weights": "replay of ids and weights",
    "quantized": "replay of ids, quantised weights",
}
"""What the trainer's pass of each level had of the engine's, in words."""
_CAUSES = {"routes": "ids", "quantization": "quantized"}
"""For each cause, the level in which it is gone. Each level also lacks the causes before its own."""


def parts_of_gap(levels: Levels, measure: str) -> dict[str, float]:
    """Return the parts of one measure of the gap by cause, such as {"total": 0.1, "routes": 0.04,
    "quantization": 0.02, "rest": 0.04}.

    `routes` is what the replay of the engine's expert ids removes from the gap, `quantization` what the
    engine's quantised weights remove after that, and `rest` what remains. They add up to `total`; a
    part is negative if the gap grows in its level. A cause without its level is left out. The result is
    empty if there is no cause, or if a number is missing.
    """
    total = left = levels.get("none", {}).get(measure)
    if total is None or left is None:
        return {}
    parts = {"total": total}
    for cause, level in _CAUSES.items():
        if level not in levels:
            continue
        remains = levels[level].get(measure)
        if remains is None:
            return {}
        parts[cause], left = left - remains, remains
    return {**parts, "rest": left} if len(parts) > 1 else {}


def quantization_in_words(levels: Levels) -> str:
    """Return a sentence about the quantised weights' part of the mean |d|; empty if the decomposition
    has no level `quantized`."""
    parts = parts_of_gap(levels, "logprob_abs_mean")
    if "quantization" not in parts:
        return ""
    routes = f"{parts['routes']:.3g} from other routes, " if "routes" in parts else ""
    return (
        f"of the mean |d| of {parts['total']:.3g}: {routes}{parts['quantization']:.3g} from the "
        f"engine's quantised weights (quantization), {parts['rest']:.3g} from its quantised inputs and "
        "rounding (rest)"
    )
