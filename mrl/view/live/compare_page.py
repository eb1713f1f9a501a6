"""The live page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mrl.view.compare import (
    charts_of,
    check_runs,
    differences_of,
    flat,
    is_compared,
    names_of,
    outcome_table,
    series_of,
    units_of_charts,
)
from mrl.view.facts import value_of
from mrl.view.live.growing import GrowingCurves, drawn_values
from mrl.view.live.pages import LivePage
from mrl.view.live.run_files import RunFiles
from mrl.view.live.status import Status, in_words
from mrl.view.outcome import Row, figures


class ComparePage(LivePage):
    """Several run folders, some of which may not be there yet."""

    kind = "comparison"

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises InputError if the folders cannot be compared."""
        check_runs(folders)
        self.names = names_of(folders)
        super().__init__(", ".join(self.names))
        self._keys: dict[str, set[int]] = {}
        """The numbers of the runs that have a metric."""
        self._runs = [_Run(folder, i, self) for i, folder in enumerate(folders)]
        self._outcomes: list[Any] = [[] for _ in folders]
        self._recipes: list[dict[str, Any]] = [{} for _ in folders]
        self._flat_notes: list[list[str]] = [[] for _ in folders]

    @property
    def is_behind(self) -> bool:
        return any(run.files.metrics.is_behind for run in self._runs)

    def read(self) -> None:
        for i, run in enumerate(self._runs):
            changed = run.files.poll()
            run.status.poll()
            if changed & {"added", "restarted", "evaluations"}:
                evaluations = run.files.evaluations
                ordered = [evaluations[at] for at in sorted(evaluations)]
                self._outcomes[i] = figures(run.files.totals, ordered)
            if "recipe" in changed:
                self._flat_notes[i] = []
                self._recipes[i] = flat(run.files.recipe, self._flat_notes[i])

    def note_keys(self, number: int, row: Row) -> None:
        for key in row:
            if is_compared(key):
                self._keys.setdefault(key, set()).add(number)

    def forget(self, number: int) -> None:
        """Start the curves of a run from the beginning."""
        for key in list(self._keys):
            self._keys[key].discard(number)
            if not self._keys[key]:
                del self._keys[key]
        self.start_over()

    def parts(self) -> dict[str, Any]:
        words = [run.word for run in self._runs]
        notes = [self.problem] if self.problem else []
        for name, run, word, more in zip(
            self.names, self._runs, words, self._flat_notes, strict=True
        ):
            own = [in_words(word, run.files.folder)] if word not in ("running", "finished") else []
            if run.files.metrics.num_bad:
                own.append(
                    f"Lines of metrics.jsonl that could not be read: {run.files.metrics.num_bad}."
                )
            notes += [f"{name}: {note}" for note in [*own, *run.files.notes, *more] if note]
        return {
            "head": {
                "word": _word_of_all(words),
                "state": f"{len(self._runs)} runs compared",
                "note": "",
                "done": None,
                "planned": None,
                "share_read": None,
                "failure": None,
                "notes": notes,
            },
            "runs": [
                {"name": name, "word": word, "done": run.files.metrics.last_step + 1}
                for name, run, word in zip(self.names, self._runs, words, strict=True)
            ],
            "outcomes": [list(each) for each in outcome_table(self._outcomes)],
            "differences": [list(each) for each in differences_of(self._recipes)],
            "charts": charts_of(self._keys, self.names),
        }

    def curves(self) -> dict[str, Any]:
        parts = [run.curves.data() for run in self._runs]
        steps = sorted({step for part in parts for step in part["steps"]})
        places = {step: place for place, step in enumerate(steps)}
        series: dict[str, Any] = {}
        for part in parts:
            for key, each in part["series"].items():
                own = [part["steps"][at] for at in each["at"]] if "at" in each else part["steps"]
                series[key] = {"v": each["v"], "at": [places[step] for step in own]}
        return {
            "steps": steps,
            "series": series,
            "step": "step",
            "units": units_of_charts(self._keys),
            "thinned": any(part["thinned"] for part in parts),
            "clipped": [],
        }


def _word_of_all(words: Sequence[str]) -> str:
    for word in ("running", "waiting"):
        if word in words:
            return word
    return words[0] if len(set(words)) == 1 else "ended"


class _Run:
    """One of the runs."""

    def __init__(self, folder: Path, number: int, page: ComparePage) -> None:
        self._number, self._page = number, page
        self.curves = GrowingCurves()
        add, restart = partial(self._add), partial(self._restart)
        self.files = RunFiles(folder, restart=restart, add=add)
        self.status = Status(folder)

    @property
    def word(self) -> str:
        done = self.files.metrics.last_step + 1
        is_done = done > 0 and done == value_of(self.files.recipe, "train.num_steps")
        return self.status.word(is_done=is_done, has_rows=done > 0)

    def _restart(self) -> None:
        self.curves = GrowingCurves()
        self._page.forget(self._number)

    def _add(self, row: Row) -> None:
        self._page.note_keys(self._number, row)
        own: dict[str, Any] = {
            series_of(key, self._number): row[key] for key in row if is_compared(key)
        }
        self.curves.add({**own, "step": row["step"]})
        if self.files.metrics.is_behind:
            return
        units = units_of_charts({key: {self._number} for key in row if is_compared(key)})
        event = {"step": row["step"], "values": drawn_values(own), "units": units}
        self._page.add_row(event)
