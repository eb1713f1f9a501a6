"""The live page of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.system.json_text import is_number
from mrl.view.facts import OF_RUN, local_time, named_values, steps_in_words, value_of
from mrl.view.live.growing import GrowingCurves, drawn_values
from mrl.view.live.pages import LivePage
from mrl.view.live.run_files import RunFiles
from mrl.view.live.samples import Rollouts
from mrl.view.live.status import Status, failure_in_words, in_words
from mrl.view.outcome import Row, figures
from mrl.view.series import notes_of
from mrl.view.timeline import draw_timeline
from mrl.view.units import units_of


class RunPage(LivePage):
    """A run folder, which may not be there yet."""

    kind = "run"

    def __init__(
        self, folder: Path, tenant: str = "", owner: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """`owner`: if the run is that of a service's tenant, a function that returns the parts of the
        page that come from the service: `word`, `note` and `phase`."""
        super().__init__(f"{tenant}: {folder}" if tenant else str(folder))
        self.folder, self._owner = folder, owner
        self.files = RunFiles(folder, restart=self._restart, add=self._add)
        self.status = Status(folder)
        self.rollouts = Rollouts(folder)
        self._curves = GrowingCurves()
        self._known: set[str] = set()
        self._timeline: dict[str, Any] = {}
        self._figures: list[Any] = []
        self._summary: list[tuple[str, str]] = []

    def _restart(self) -> None:
        self._curves, self._known = GrowingCurves(), set()
        self.start_over()

    def _add(self, row: Row) -> None:
        self._curves.add(row)
        if self.is_behind:
            return
        values = drawn_values(row)
        new = units_of(values.keys() - self._known)
        self._known |= new.keys()
        self.add_row({"step": row["step"], "values": values, "units": new})

    @property
    def is_behind(self) -> bool:
        return self.files.metrics.is_behind

    def read(self) -> None:
        changed = self.files.poll()
        self.status.poll()
        recipe = self.files.recipe
        if changed & {"added", "restarted", "evaluations"} or not self._shown:
            evaluations = [self.files.evaluations[at] for at in sorted(self.files.evaluations)]
            self._figures = [list(each) for each in figures(self.files.totals, evaluations)]
        if "evaluations" in changed:
            self._add_last_evaluation()
        if changed & {"timeline", "recipe"} or not self._timeline:
            placement = value_of(recipe, "rollout.placement")
            self._timeline = draw_timeline(list(self.files.timeline), placement)
            if not recipe and not self.files.timeline:
                self._timeline = {"why": "No step is done yet."}
        if "recipe" in changed:
            self._summary = named_values(recipe, OF_RUN)
        assert self.rollouts is not None
        self.rollouts.poll(self.files.metrics.last_step + 1)

    def _add_last_evaluation(self) -> None:
        """Show the evaluation of the final weights, which no row has, as a row of its own."""
        last = self.files.metrics.last_step
        for step in sorted(at for at in self.files.evaluations if at > last):
            values = drawn_values(self.files.evaluations[step])
            self.add_row({"step": step, "values": values, "units": units_of(values)})

    def parts(self) -> dict[str, Any]:
        files, word = self.files, self._word()
        staleness = [[age, files.staleness[age]] for age in sorted(files.staleness)]
        parts: dict[str, Any] = {
            "head": self._head(word),
            "figures": self._figures,
            "recipe": {"summary": self._summary, "text": files.recipe_text},
            "phase": None if word in ("finished", "ended") else self.status.phase,
            "samples": self.rollouts.around() if self.rollouts is not None else {},
            "timeline": {**self._timeline, "staleness": staleness},
        }
        if self._owner is not None:
            owner = self._owner()
            parts["phase"] = owner["phase"]
        return parts

    def _word(self) -> str:
        if self._owner is not None:
            return self._owner()["word"]
        return self.status.word(is_done=self._is_done, has_rows=self.files.metrics.last_step >= 0)

    @property
    def _is_done(self) -> bool:
        done = self.files.metrics.last_step + 1
        return done > 0 and done == value_of(self.files.recipe, "train.num_steps")

    def _head(self, word: str) -> dict[str, Any]:
        files, failure = self.files, self.status.failure
        done, planned = files.metrics.last_step + 1, value_of(files.recipe, "train.num_steps")
        noted = files.last_time
        note = in_words(word, self.folder) if self._owner is None else self._owner()["note"]
        if word == "silent":
            note += f"; the last sign was at {local_time(self.status.last_sign)}"
        return {
            "word": word,
            "state": steps_in_words(done, planned, float(noted) if is_number(noted) else None),
            "note": note,
            "done": done,
            "planned": planned if isinstance(planned, int) else None,
            "share_read": round(files.metrics.share_read, 2) if files.metrics.is_behind else None,
            "failure": None if failure is None else failure_in_words(failure),
            "notes": self._notes(),
        }

    def _notes(self) -> list[str]:
        files, notes = self.files, []
        if self.problem:
            notes.append(self.problem)
        if files.metrics.num_bad:
            notes.append(f"Lines of metrics.jsonl that could not be read: {files.metrics.num_bad}.")
        if files.metrics.is_missing and files.metrics.last_step >= 0:
            notes.append("metrics.jsonl is gone; the page shows what was read before.")
        return [*notes, *files.notes, *notes_of(self._curves.notes, "steps")]

    def curves(self) -> dict[str, Any]:
        drawn = self._with_last_evaluation(self._curves.data())
        self._known = set(drawn["series"])
        return drawn | {"step": "step", "units": units_of(drawn["series"])}

    def _with_last_evaluation(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Add the evaluation of the final weights to curves, which then all have `at`."""
        last = self.files.metrics.last_step
        later = sorted(at for at in self.files.evaluations if at > last)
        if not later:
            return drawn
        for series in drawn["series"].values():
            series.setdefault("at", list(range(len(drawn["steps"]))))
        for step in later:
            place = len(drawn["steps"])
            drawn["steps"].append(step)
            for key, value in drawn_values(self.files.evaluations[step]).items():
                series = drawn["series"].setdefault(key, {"v": [], "at": []})
                series["v"].append(value)
                series["at"].append(place)
        return drawn
