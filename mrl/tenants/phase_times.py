"""Turns the sums of the engines' gates and the trainer's seconds into the metrics of a service.

The sums are those of `mrl.rollout.gate_times.GateTimes`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

from mrl.exchange.sharing import share_bytes


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of several gates, or of several times, as those of one."""
    total: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for key, value in part.items():
            total[key] += value
    return dict(total)


def add_up_ranks(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of all ranks on every rank. A collective."""
    said = share_bytes(json.dumps(sums).encode() if sums else b"")
    return add_up(json.loads(each) for each in said if each)


def of_names(sums: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Return the sums with the names of tenants in place of the names that engines use for them. The
    numbers of other tenants, such as one that has left, are in the totals only."""
    found: dict[str, float] = {}
    for key, value in sums.items():
        called, slash, what = key.partition("/")
        if not slash:
            found[key] = value
        elif called in names:
            found[f"{names[called]}/{what}"] = value
    return found


def engine_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return how full the engines were in the time of these sums, and whose requests filled them. What
    there was nothing of has no key."""
    found = {
        **_ratio("service/engine_occupancy", sums, "running_s", "room_s"),
        **_ratio("service/running_requests", sums, "running_s", "seconds"),
        **_ratio("service/kv_occupancy", sums, "held_s", "cache_s", at_most=1.0),
        **_ratio("service/kv_counted", sums, "counted_s", "cache_s", at_most=1.0),
        **_ratio("service/batch_tenants", sums, "mix_s", "busy_s"),
    }
    for name in sorted({key.split("/")[0] for key in sums if "/" in key}):
        found[f"service/{name}/tokens"] = sums.get(f"{name}/tokens", 0.0)
        found |= _ratio(f"service/{name}/batch_share", sums, f"{name}/sent_s", "sent_s")
        found |= _ratio(f"service/{name}/gate_wait_s", sums, f"{name}/waited_s", f"{name}/requests")
    return found


def trainer_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the trainer's seconds of each tenant, from what each took."""
    whole = sum(seconds.values())
    return {
        f"service/{name}/trainer_share": each / whole for name, each in seconds.items() if whole
    }


def _ratio(
    key: str, sums: Mapping[str, float], part: str, whole: str, *, at_most: float = float("inf")
) -> dict[str, float]:
    """Return one sum over another under a key; nothing where there is nothing to divide by."""
    if not sums.get(whole):
        return {}
    return {key: min(at_most, sums.get(part, 0.0) / sums[whole])}
