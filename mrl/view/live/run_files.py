"""The files of a run folder as the live page reads them: each byte once, while the run writes them."""

from __future__ import annotations

import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from mrl.run.timeline import step_of_row
from mrl.system.json_text import parse_row
from mrl.view.facts import read_config
from mrl.view.live.tail import Tail
from mrl.view.outcome import Row, Totals, read_evaluation
from mrl.view.series import with_step
from mrl.view.timeline import MAX_STEPS, add_staleness

Signature = tuple[int, int, int] | None
"""Identity, size and time of a file; None if there is no file."""
Happened = Literal["added", "restarted"]


def signature(file: Path) -> Signature:
    """Return what changes whenever a file or a folder changes; None also for a pipe or a device, which
    must not be opened."""
    with suppress(OSError, ValueError):
        there = file.stat()
        if stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode):
            return there.st_ino, there.st_size, there.st_mtime_ns
    return None


class Metrics:
    """The rows of metrics.jsonl, one after the other.

    A row whose step is not larger than that of the row before it shows that the run went back. A new
    file then holds all rows that count; the same file is read again from its beginning. Of several rows
    of a step the last one counts, as on the written page.
    """

    def __init__(
        self, file: Path, *, restart: Callable[[], None], add: Callable[[Row], None]
    ) -> None:
        """`restart` is called when the rows so far no longer count, `add` with each row that counts, by
        ascending step."""
        self._tail, self._restart, self._add = Tail(file), restart, add
        self.last_step = -1
        self.num_bad = 0
        self.is_missing = self.is_behind = False
        """Whether the file is not there, and whether it has rows that were not read yet."""

    @property
    def share_read(self) -> float:
        """Which share of the file was read, 0 to 1."""
        return min(1.0, self._tail.offset / self._tail.size) if self._tail.size else 1.0

    def poll(self) -> set[Happened]:
        """Read what is new, but no more than takes about a second."""
        news = self._tail.poll()
        self.is_missing, self.is_behind = news.is_missing, news.is_behind
        self.num_bad += news.num_skipped
        happened: set[Happened] = set()
        is_new = news.is_new
        if is_new:
            self.num_bad = news.num_skipped
        for line in news.lines:
            row = self._row(line)
            if row is None:
                continue
            if row["step"] <= self.last_step:
                happened.add("restarted")
                self._start_over()
                if not is_new:
                    self._read_sorted()
                    break
            is_new = False  # the first row of a new file shows whether it goes on or starts over
            self._take(row)
            happened.add("added")
        return happened

    def _row(self, line: bytes) -> Row | None:
        """Return the row in a line. A line without one is counted, unless it is empty."""
        with suppress(ValueError):
            if (row := with_step(parse_row(line))) is not None:
                return row
        self.num_bad += bool(line.strip())
        return None

    def _take(self, row: Row) -> None:
        self.last_step = row["step"]
        self._add(row)

    def _start_over(self) -> None:
        self.last_step = -1
        self._restart()

    def _read_sorted(self) -> None:
        """Read the whole file, and take the last row of each step, by ascending step."""
        places = {}
        self.num_bad = 0
        for line, place in self._lines():
            if (row := self._row(line)) is not None:
                places[row["step"]] = place
        wanted = [places[step] for step in sorted(places)]
        num_bad = self.num_bad
        with suppress(OSError), self._tail.file.open("rb") as stream:
            for place in wanted:
                stream.seek(place)
                if (row := self._row(stream.readline().rstrip(b"\n"))) is not None:
                    self._take(row)
        self.num_bad = num_bad

    def _lines(self) -> Iterator[tuple[bytes, int]]:
        """Yield the lines up to where the tail has read, with their places in the file."""
        place = 0
        with suppress(OSError), self._tail.file.open("rb") as stream:
            for line in stream:
                if place + len(line) > self._tail.offset or not line.endswith(b"\n"):
                    return
                yield line[:-1], place
                place += len(line)


class RunFiles:
    """The rows, the evaluations, the recipe and the timeline of a run folder."""

    def __init__(
        self, folder: Path, *, restart: Callable[[], None], add: Callable[[Row], None]
    ) -> None:
        """`restart` and `add`: see `Metrics`."""
        self.folder = folder
        self._on_restart, self._on_row = restart, add
        self.metrics = Metrics(folder / "metrics.jsonl", restart=self._restart, add=self._add)
        self.totals = Totals()
        self.staleness: Counter[int] = Counter()
        self.last_time: Any = None
        """`time/timestamp` of the newest row."""
        self.evaluations: dict[int, Row] = {}
        self.recipe: dict[str, Any] = {}
        self.recipe_text = ""
        self.notes: list[str] = []
        self.timeline: deque[Row] = deque(maxlen=MAX_STEPS)
        self._timeline = Tail(folder / "timeline.jsonl")
        self._config: Signature = None
        self._evals: Signature = None
        self._read_evals: dict[str, Signature] = {}

    def poll(self) -> set[str]:
        """Read what is new. Return what has changed: `added`, `restarted`, `recipe`, `evaluations`,
        `timeline`."""
        changed: set[str] = set(self.metrics.poll())
        if "restarted" in changed:
            self._evals, self._read_evals = None, {}
            self.evaluations.clear()
        if self._poll_recipe():
            changed.add("recipe")
        if self._poll_evaluations():
            changed.add("evaluations")
        if self._poll_timeline():
            changed.add("timeline")
        return changed

    def _restart(self) -> None:
        self.totals, self.last_time = Totals(), None
        self.staleness.clear()
        self._on_restart()

    def _add(self, row: Row) -> None:
        self.totals.add(row)
        add_staleness(row, self.staleness)
        self.last_time = row.get("time/timestamp")
        self._on_row(row)

    def _poll_recipe(self) -> bool:
        found = signature(self.folder / "config.yaml")
        if found == self._config or found is None:
            return False
        self._config = found
        notes: list[str] = []
        try:
            self.recipe, self.recipe_text = read_config(self.folder / "config.yaml", notes)
        except OSError:
            return False
        self.notes = notes
        return True

    def _poll_evaluations(self) -> bool:
        found = signature(self.folder / "evals")
        if found == self._evals or found is None:
            return False
        self._evals = found
        has_changed = False
        for file in sorted((self.folder / "evals").glob("step_*.json")):
            there = signature(file)
            if there is not None and self._read_evals.get(file.name) != there:
                with suppress(OSError, ValueError):
                    row = read_evaluation(file)
                    self.evaluations[row["step"]] = row
                    has_changed = True
                self._read_evals[file.name] = there
        return has_changed

    def _poll_timeline(self) -> bool:
        news = self._timeline.poll()
        if news.is_new:
            self.timeline.clear()
        for line in news.lines[-MAX_STEPS:]:
            step = step_of_row(line)
            if step >= 0:
                while self.timeline and self.timeline[-1]["step"] >= step:
                    self.timeline.pop()
                self.timeline.append(parse_row(line))
        return bool(news.lines) or news.is_new
