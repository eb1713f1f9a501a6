"""Says what each tenant had over several rounds, from rows of the service's metrics.jsonl: who holds
whom up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class OverRounds(NamedTuple):
    """Is what one tenant had over some rounds; None where no round has it."""

    trainer_share: float | None
    """Its swaps and updates over those of all tenants."""
    tokens: float
    """Tokens that were generated for it."""
    tokens_share: float | None
    gate_wait_s: float | None
    """How long its requests waited to be sent to the engine, a mean over its rounds."""
    queue_age_s: float | None
    """How long it waited with its samples to be trained, a mean over its rounds."""


def over_rounds(
    rows: Iterable[Mapping[str, Any]], tenants: Mapping[str, int]
) -> dict[str, OverRounds]:
    """Return what each of these tenants had over these rounds; the shares are of what all of them had.

    `tenants`: the number of each, by its name. Values of a row are left out if its
    `service/NAME/sequence` shows that they belong to another tenant of that name; rows of an older mrl
    do not have this key. Values that are not finite numbers are left out, too.
    """
    names = list(tenants)
    totals, counts = _add_up(_own(row, tenants) for row in rows)

    def total(name: str, *parts: str) -> float:
        return sum(totals.get(f"service/{name}/{part}", 0.0) for part in parts)

    def mean(name: str, part: str) -> float | None:
        return _ratio(total(name, part), counts.get(f"service/{name}/{part}", 0))

    trainer_s = {name: total(name, "swap_s", "update_s") for name in names}
    tokens = {name: total(name, "tokens") for name in names}
    return {
        name: OverRounds(
            _ratio(trainer_s[name], sum(trainer_s.values())),
            tokens[name],
            _ratio(tokens[name], sum(tokens.values())),
            mean(name, "gate_wait_s"),
            mean(name, "queue_age_s"),
        )
        for name in names
    }


def finite(value: Any) -> float | None:
    """Return a value that is a finite number; None for any other."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _own(row: Mapping[str, Any], tenants: Mapping[str, int]) -> dict[str, Any]:
    """Return a row without the values that belong to other tenants of these names."""
    others = [
        f"service/{name}/"
        for name, number in tenants.items()
        if row.get(f"service/{name}/sequence", number) != number
    ]
    return {key: value for key, value in row.items() if not key.startswith(tuple(others))}


def _add_up(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, int]]:
    """Return of each key the sum over the rows, and the number of rows that have it."""
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            if (number := finite(value)) is not None:
                totals[key] = totals.get(key, 0.0) + number
                counts[key] = counts.get(key, 0) + 1
    return totals, counts


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
