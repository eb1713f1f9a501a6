"""Read diagnosis/step_*.json, the mismatch decomposition of a step.

This module needs neither torch nor Megatron.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.run.gap_parts import parts_of_gap
from mrl.system.json_text import check_kinds, parse_row

KINDS = {
    "num_tokens": "whole",
    "levels": "object",
    "layers": "list",
    "first_divergent_layer": "whole|null",
}
LAYER_KINDS = {
    "layer": "whole",
    "gap_without": "number|null",
    "gap_first": "number|null",
    "hidden_rel_diff": "number|null",
}


def read_decomposition(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file diagnosis/step_*.json. Under the key `parts` it also has the
    parts of the gap by cause (`parts_of_gap`), for each measure that has any.

    Raises InputError if the file cannot be read or is damaged.
    """
    try:
        found = parse_row(file.read_bytes())
        check_kinds(found, KINDS, ("levels", "layers"))
        for measures in found["levels"].values():
            _check_numbers(measures)
        for layer in found["layers"]:
            _check_numbers(layer)
            check_kinds(layer, LAYER_KINDS, ("layer",))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(
            f"{file}: the file is damaged ({error}); restore it or remove it"
        ) from None
    measures = dict.fromkeys(name for level in found["levels"].values() for name in level)
    parts = {name: parts_of_gap(found["levels"], name) for name in measures}
    return found | {"parts": {name: by_cause for name, by_cause in parts.items() if by_cause}}


def _check_numbers(values: Any) -> None:
    if not isinstance(values, dict):
        raise ValueError("a list of numbers by name is missing in it")
    check_kinds(values, dict.fromkeys(values, "number|null"))
