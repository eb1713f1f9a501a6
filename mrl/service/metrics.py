"""Computes the metrics of a service, and each tenant's shares and waits over several rounds.

The metrics are computed from the seconds that the trainer worked for each tenant, and from
statistics of the engines' gates (`mrl.engines.gate_times.GateTimes`). An engine's gate decides when
each tenant's requests are sent to the engine. The shares over rounds are computed from rows of the
service's metrics.jsonl.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up several mappings: return the sum of the values of each key."""
    total: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for key, value in part.items():
            total[key] += value
    return dict(total)


def of_names(sums: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Return the engine statistics `sums` with keys that contain the tenants' own names, instead of
    the names by which engines know the tenants.

    `names`: maps an engine's name for a tenant to the tenant's own name. Statistics of tenants that
    are not in `names`, for example because they have left, are dropped, but the totals over all
    tenants still include them.
    """
    found: dict[str, float] = {}
    for key, value in sums.items():
        called, slash, what = key.partition("/")
        if not slash:
            found[key] = value
        elif called in names:
            found[f"{names[called]}/{what}"] = value
    return found


def engine_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return metrics that say how full the engines were, and which share of the requests each
    tenant had. `sums`: the engines' statistics over some period (see `GateTimes`). A ratio is left
    out if its denominator is 0."""

    def ratio(part: str, whole: str, *, at_most: float = math.inf) -> float | None:
        found = _ratio(sums.get(part, 0.0), sums.get(whole, 0.0))
        return None if found is None else min(at_most, found)

    found: dict[str, float | None] = {
        "service/engine_occupancy": ratio("running_s", "room_s"),
        "service/running_requests": ratio("running_s", "seconds"),
        "service/kv_occupancy": ratio("held_s", "cache_s", at_most=1.0),
        "service/kv_counted": ratio("counted_s", "cache_s", at_most=1.0),
        "service/batch_tenants": ratio("mix_s", "busy_s"),
    }
    for name in sorted({key.split("/")[0] for key in sums if "/" in key}):
        found[f"service/{name}/tokens"] = sums.get(f"{name}/tokens", 0.0)
        found[f"service/{name}/batch_share"] = ratio(f"{name}/sent_s", "sent_s")
        found[f"service/{name}/gate_wait_s"] = ratio(f"{name}/waited_s", f"{name}/requests")
    return {key: value for key, value in found.items() if value is not None}


def trainer_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each tenant's share of the trainer's time. `seconds`: the trainer's seconds by
    tenant."""
    whole = sum(seconds.values())
    return {
        f"service/{name}/trainer_share": each / whole for name, each in seconds.items() if whole
    }


class OverRounds(NamedTuple):
    """Totals and means of one tenant over some rounds. Fields other than `tokens` are None if no
    round has a value for them."""

    trainer_share: float | None
    """The tenant's share of the trainer's time (0 to 1). A tenant's time is the seconds of its
    updates and swaps; a swap brings the tenant's state to the device before an update."""
    tokens: float
    """Number of tokens that were generated for the tenant."""
    tokens_share: float | None
    gate_wait_s: float | None
    """How many seconds the tenant's requests waited on average before they were sent to the engine.
    Every round has the same weight in the average."""
    queue_age_s: float | None
    """Seconds that the tenant waited for its update after its samples were complete, averaged over
    the rounds."""


def over_rounds(
    rows: Iterable[Mapping[str, Any]], tenants: Mapping[str, int]
) -> dict[str, OverRounds]:
    """Return, for each tenant in `tenants`, the totals and means of its metrics over the rounds in
    `rows`. The shares of all tenants in `tenants` add up to 1.

    `tenants`: for each tenant name, the number that distinguishes the tenant from others with the
    same name (`Tenant.sequence`). In a row, `service/NAME/sequence` is the number of the tenant to
    which the row's values for NAME belong. Values of a tenant with another number are left out.
    Rows of older versions of mrl lack this number, and their values count. Values that are not
    finite numbers are left out.
    """
    return RoundTotals(rows).of(tenants)


class RoundTotals:
    """Sums of the tenants' metrics over rounds, to which rows are added one by one."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._sums: defaultdict[tuple[str, Any, str], float] = defaultdict(float)
        """By the name of a tenant, `_owner` of the row, and the rest of the metric's key."""
        self._counts: Counter[tuple[str, Any, str]] = Counter()
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the finite numbers of a row."""
        for key, value in row.items():
            room, _, rest = key.partition("/")
            name, slash, part = rest.partition("/")
            number = finite(value)
            if room == "service" and slash and number is not None:
                place = name, _owner(row, name), part
                self._sums[place] += number
                self._counts[place] += 1

    def of(self, tenants: Mapping[str, int]) -> dict[str, OverRounds]:
        """Return the totals and means of each tenant: see `over_rounds`."""

        def total(name: str, *parts: str) -> float:
            places = [(name, owner, part) for owner in (None, tenants[name]) for part in parts]
            return sum(self._sums.get(place, 0.0) for place in places)

        def mean(name: str, part: str) -> float | None:
            places = [(name, owner, part) for owner in (None, tenants[name])]
            return _ratio(total(name, part), sum(self._counts[place] for place in places))

        trainer_s = {name: total(name, "swap_s", "update_s") for name in tenants}
        tokens = {name: total(name, "tokens") for name in tenants}
        return {
            name: OverRounds(
                _ratio(trainer_s[name], sum(trainer_s.values())),
                tokens[name],
                _ratio(tokens[name], sum(tokens.values())),
                mean(name, "gate_wait_s"),
                mean(name, "queue_age_s"),
            )
            for name in tenants
        }


def finite(value: Any) -> float | None:
    """Return `value` if it is a finite number, otherwise None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _owner(row: Mapping[str, Any], name: str) -> float | None:
    """Return the number of the tenant to which a row's values for `name` belong; None if the row has
    no such number, -1 if it is damaged."""
    key = f"service/{name}/sequence"
    if key not in row:
        return None
    number = finite(row[key])
    return -1 if number is None else number


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
