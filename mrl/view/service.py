"""Reads a service folder as JSON-able data for its page.

The service may be running, have ended, or never have started. A round is a line of metrics.jsonl. Each
start of a service counts its rounds from 0; the page numbers the rounds of all starts consecutively.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mrl.service.metrics import OverRounds, RoundTotals, finite
from mrl.service.record import Tenant, describe, read_past, read_tenants
from mrl.view.facts import local_time, named_values, read_config
from mrl.view.series import curves, notes_of, read_objects
from mrl.view.units import units_of
from mrl.web.unix_socket import connect_unix

CONNECT_S = 2.0
NOTHING = "\u2013"
"""The text that replaces a missing number."""
SUMMARY = (
    ("model", "model.path"),
    ("tensor x pipeline x expert x context", *(f"parallel.{kind}_parallel_size" for kind in (
        "tensor_model", "pipeline_model", "expert_model", "context"))),
    ("placement", "rollout.placement"),
    ("KV cache, tokens", "rollout.max_total_tokens"),
    ("requests at once", "rollout.max_running_requests"),
    ("adapter slots", "lora.slots"),
    ("largest rank", "lora.max_rank"),
    ("tenants at most", "tenants.max_number"),
    ("bound on the wait, s", "schedule.max_wait_s"),
)  # fmt: skip
"""The entries of the page's header. Each is a name, followed by the keys of service.yaml whose
values are shown."""
NEWEST = (("reward", "reward/mean"), ("length", "response_len/mean"),
          ("gradient", "grad_norm"), ("mismatch", "mismatch/logprob_abs_max"))  # fmt: skip
"""Pairs (heading, metric) for the values of a tenant's newest step."""
OVER_ROUNDS = ("trainer", "tokens", "of all", "at the gate, s", "for trainer, s")
"""Headings for a tenant's values over all rounds; `_in_words` returns the values."""

Row = dict[str, Any]


def is_service(folder: Path) -> bool:
    """Return whether `folder` is the folder of a service."""
    return (folder / "service.yaml").is_file() and (folder / "tenants").is_dir()


def collect_service(folder: Path, page: Path) -> dict[str, Any]:
    """Return everything that the page of a service shows.

    page: the path of the page, to which its links are relative. Raises InputError if the state of a
    tenant is damaged.
    """
    notes: list[str] = []
    config, text = read_config(folder / "service.yaml", notes)
    found, num_bad = read_objects(folder / "metrics.jsonl")
    if num_bad:
        notes.append(f"Lines of metrics.jsonl that could not be read: {num_bad}.")
    numbers, totals = RoundNumbers(), RoundTotals(found)
    rows = [numbers.number(row) for row in found]
    drawn = curves(rows)
    notes += notes_of(drawn, "rounds")
    present, past = read_tenants(folder), read_past(folder)
    return {
        "folder": str(folder),
        "state": _state(folder, rows),
        "summary": named_values(config, SUMMARY),
        "config": text,
        "tenants": table(
            present,
            past,
            totals,
            lambda tenant: _link(Path(tenant.output_dir), tenant, page.parent),
        ),
        "newest": [name for name, _ in NEWEST],
        "over_rounds": list(OVER_ROUNDS),
        "metrics": drawn | {"step": "round", "units": units_of(drawn["series"])},
        "notes": notes,
    }


class RoundNumbers:
    """Numbers the rounds of all starts of a service.

    A start of the service counts `round` from 0. So a row is from a new start if its `round` is not
    larger than the `round` of the row before it. A row without a valid `round` gets the next number.
    """

    def __init__(self) -> None:
        self._first, self._last = 0, -1

    def number(self, row: Row) -> Row:
        """Return the next row, with `round` replaced by `step`, a number that increases over all
        starts."""
        given = finite(row.get("round"))
        number = self._last + 1 - self._first
        if given is not None and abs(given) <= 2**31:
            number = int(given)
        if self._first + number <= self._last:
            self._first = self._last + 1 - number
        self._last = self._first + number
        return {key: value for key, value in row.items() if key != "round"} | {"step": self._last}


def _state(folder: Path, rows: Sequence[Row]) -> str:
    runs = "it ran" if _listens(folder) else "no service ran in it here"
    done = "no round" if not rows else f"{len(rows)} round{'s' * (len(rows) > 1)}"
    ended = finite(rows[-1].get("time/timestamp")) if rows else None
    when = "" if ended is None else f", the last at {local_time(ended)}"
    return f"service: {done}{when}; {runs} when this page was made"


def _listens(folder: Path) -> bool:
    try:
        connect_unix(folder, CONNECT_S).close()
    except OSError:
        return False
    return True


def table(
    present: Sequence[Tenant],
    past: Sequence[Tenant],
    totals: RoundTotals,
    link: Callable[[Tenant], tuple[str, str]],
    describe: Callable[[Tenant], dict[str, Any]] = describe,
) -> list[dict[str, Any]]:
    """Return the rows of the table of tenants; removed tenants come last.

    past: removed tenants whose name was given to a later tenant. totals: those of all rows of
    metrics.jsonl. link: returns the target and the text of the link to a tenant's page; the target is
    empty if there is nothing to link to.
    """
    rows = []
    of_past = {tenant.incarnation for tenant in past}
    found = totals.of({tenant.name: tenant.sequence for tenant in present})
    for tenant in sorted([*present, *past], key=lambda t: (t.state == "removed", t.sequence)):
        shown = describe(tenant)
        newest = [_short(shown["metrics"].get(key)) for _, key in NEWEST]
        whole = [NOTHING] * len(OVER_ROUNDS)
        if tenant.incarnation not in of_past:
            whole = _in_words(found[tenant.name])
        target, words = link(tenant)
        done = NOTHING if not target and tenant.state != "queued" else shown["steps_done"]
        rows.append(
            {
                "name": tenant.name,
                "state": tenant.state,
                "reason": tenant.reason,
                "steps": f"{done} of {tenant.num_steps or '?'}",
                "weight": f"{tenant.weight:g}",
                "numbers": newest + whole,
                "link": target,
                "link_words": words,
            }
        )
    return rows


def _in_words(found: OverRounds) -> list[str]:
    """Return a tenant's values over all rounds as strings, in the order of OVER_ROUNDS."""
    return [
        _percent(found.trainer_share),
        f"{found.tokens:,.0f}" if found.tokens else NOTHING,
        _percent(found.tokens_share),
        _short(found.gate_wait_s),
        _short(found.queue_age_s),
    ]


def _link(run: Path, tenant: Tenant, near: Path) -> tuple[str, str]:
    """Return the target and the text of the link to a tenant's page.

    If the page does not exist, the link is to the run folder `run`. The target is relative to the
    folder `near`; it is empty if there is no run folder either.
    """
    path = os.path.relpath(run, os.path.realpath(near))
    words = path if not path.startswith("..") else str(run)
    if (run / "view.html").is_file():
        return quote(f"{path}/view.html"), words
    if run.is_dir():
        return quote(f"{path}/"), f"{words} (folder)"
    return "", f"{words} (not there{' yet' * (tenant.state == 'queued')})"


def _short(value: Any) -> str:
    number = finite(value)
    if number is None:
        return NOTHING
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"
