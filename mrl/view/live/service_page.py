"""The live page of a service, with its tenants."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mrl.service.metrics import RoundTotals
from mrl.service.record import REMOVED, STATE, Tenant, describe, read_past, read_tenants
from mrl.system.json_text import is_number
from mrl.view.facts import local_time, named_values, read_config
from mrl.view.live.growing import GrowingCurves, drawn_values
from mrl.view.live.pages import LivePage
from mrl.view.live.run_files import Signature, signature
from mrl.view.live.status import Status, failure_in_words, in_words
from mrl.view.live.tail import Tail
from mrl.view.outcome import Row
from mrl.view.series import notes_of, object_in
from mrl.view.service import NEWEST, OVER_ROUNDS, SUMMARY, RoundNumbers, table
from mrl.view.units import units_of

REMOVED_S = 10.0
"""Seconds between two looks at the files of removed tenants, which hardly change any more. A service
may have thousands of them."""


class ServicePage(LivePage):
    """The folder of a service."""

    kind = "service"

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.status = Status(folder)
        self.tenants: dict[str, Tenant] = {}
        """The tenants by name, without removed ones whose name was given to another."""
        self._past: list[Tenant] = []
        self._rounds = Tail(folder / "metrics.jsonl")
        self._begin()
        self._config: Signature = None
        self._summary: list[tuple[str, str]] = []
        self._config_text = ""
        self._config_notes: list[str] = []
        self._records: dict[Path, Signature] = {}
        """The files and folders of all records, as they were when they were read last."""
        self._watched: dict[Path, Signature] = {}
        """Those of `_records` that are looked at in each poll: the ones of tenants that were not
        removed, and the folders, which change when a tenant is added."""
        self._due = 0.0
        """When the files of removed tenants are looked at again (`time.monotonic`)."""
        self._is_due = True
        """Whether that is now."""
        self._described: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._linked: dict[str, tuple[str, str]] = {}
        self._table: list[dict[str, Any]] = []

    def _begin(self) -> None:
        self._curves, self._known = GrowingCurves(), set[str]()
        self._numbers, self._totals = RoundNumbers(), RoundTotals()
        self._num_rounds = self._num_bad = 0
        self._last_time: Any = None
        self._is_behind = False

    @property
    def is_behind(self) -> bool:
        return self._is_behind

    def read(self) -> None:
        self.status.poll()
        self._read_rounds()
        found = signature(self.folder / "service.yaml")
        if found != self._config and found is not None:
            self._config, self._config_notes = found, []
            tree, self._config_text = read_config(self.folder / "service.yaml", self._config_notes)
            self._summary = named_values(tree, SUMMARY)
        self._read_tenants()
        self._table = table(
            list(self.tenants.values()), self._past, self._totals, self._link, self._describe
        )

    def _read_rounds(self) -> None:
        news = self._rounds.poll()
        self._is_behind = news.is_behind
        if news.is_new and self._num_rounds:
            self._begin()
            self.start_over()
        self._num_bad += news.num_skipped
        for line in news.lines:
            found = object_in(line)
            if found is None:
                self._num_bad += bool(line.strip())
                continue
            self._totals.add(found)
            self._add(self._numbers.number(found))

    def _add(self, row: Row) -> None:
        self._curves.add(row)
        self._num_rounds += 1
        self._last_time = row.get("time/timestamp")
        if self._is_behind:
            return
        values = drawn_values(row)
        new = units_of(values.keys() - self._known)
        self._known |= new.keys()
        self.add_row({"step": row["step"], "values": values, "units": new})

    def _read_tenants(self) -> None:
        is_same = all(signature(place) == seen for place, seen in self._watched.items())
        self._is_due = not is_same or time.monotonic() >= self._due
        if not self._is_due:
            return
        folder = self.folder / "tenants"
        folders = [folder, folder / REMOVED]
        files = [*folder.glob(f"*/{STATE}"), *folder.glob(f"{REMOVED}/*/{STATE}")]
        records = {place: signature(place) for place in (*folders, *files)}
        if records != self._records:
            self.tenants = {tenant.name: tenant for tenant in read_tenants(self.folder)}
            self._past = read_past(self.folder)
            self._records = records
        present = [each.name for each in self.tenants.values() if each.state != "removed"]
        places = [*folders, *(folder / name / STATE for name in present)]
        self._watched = {place: records.get(place) for place in places}
        self._due = time.monotonic() + REMOVED_S

    def _describe(self, tenant: Tenant) -> dict[str, Any]:
        """Return `describe(tenant)`, which reads the end of the tenant's metrics, if they have changed
        since the last call."""
        kept = self._described.get(tenant.incarnation)
        if kept is not None and not self._is_due and tenant.state == "removed":
            return kept[1]
        key = tenant, signature(Path(tenant.output_dir) / "metrics.jsonl")
        if kept is None or kept[0] != key:
            kept = self._described[tenant.incarnation] = key, describe(tenant)
        return kept[1]

    def _link(self, tenant: Tenant) -> tuple[str, str]:
        """Return the query of the tenant's page, and the path of its run folder."""
        kept = self._linked.get(tenant.incarnation)
        if kept is not None and not self._is_due and tenant.state == "removed":
            return kept
        is_there = Path(tenant.output_dir).is_dir()
        missing = f" (not there{' yet' * (tenant.state == 'queued')})"
        words = tenant.output_dir + ("" if is_there else missing)
        found = f"tenant={quote(tenant.name)}" if is_there else "", words
        self._linked[tenant.incarnation] = found
        return found

    def parts(self) -> dict[str, Any]:
        word = self.status.word(is_done=False, has_rows=self._num_rounds > 0)
        return {
            "head": self._head(word),
            "recipe": {"summary": self._summary, "text": self._config_text},
            "phase": None if word == "ended" else self.status.phase,
            "tenants": {
                "rows": self._table,
                "newest": [name for name, _ in NEWEST],
                "over_rounds": list(OVER_ROUNDS),
            },
        }

    def _head(self, word: str) -> dict[str, Any]:
        count = self._num_rounds
        state = "no round is done" if not count else f"{count} round{'s' * (count > 1)}"
        if count and is_number(self._last_time):
            state += f", the last at {local_time(float(self._last_time))}"
        notes = [self.problem] if self.problem else []
        if self._num_bad:
            notes.append(f"Lines of metrics.jsonl that could not be read: {self._num_bad}.")
        notes += [*self._config_notes, *notes_of(self._curves.notes, "rounds")]
        failure = self.status.failure
        return {
            "word": word,
            "state": state,
            "note": in_words(word, self.folder, "service"),
            "done": count,
            "planned": None,
            "share_read": None,
            "failure": None if failure is None else failure_in_words(failure),
            "notes": notes,
        }

    def of_tenant(self, name: str) -> dict[str, Any]:
        """Return what the page of a tenant's run takes from the service: `word`, `note` and `phase`."""
        tenant, word = self.tenants.get(name), self._shown.get("head", {}).get("word", "")
        phase = self.status.phase if word == "running" else None
        if tenant is None:
            note = f"the service has no tenant {name} any more"
            return {"word": "ended", "note": note, "phase": None}
        if tenant.state in ("queued", "running") and word != "running":
            return {"word": word, "note": in_words(word, self.folder, "service"), "phase": None}
        words = {"queued": "waiting", "paused": "failed", "done": "finished", "removed": "ended"}
        reason = f": {tenant.reason}" if tenant.reason else ""
        note = "" if tenant.state == "running" else f"the tenant is {tenant.state}{reason}"
        is_other = phase is not None and phase["tenant"] not in ("", name)
        if is_other or tenant.state != "running":
            phase = None
        return {"word": words.get(tenant.state, "running"), "note": note, "phase": phase}

    def curves(self) -> dict[str, Any]:
        drawn = self._curves.data()
        self._known = set(drawn["series"])
        return drawn | {"step": "round", "units": units_of(drawn["series"])}
