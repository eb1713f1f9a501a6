"""The file timeline.jsonl: the activities of trainer and engines in a disaggregated run.

The file has one row, a JSON object, per step. The keys of a row are `step`; `begin`, in seconds
since 1970; `trainer`, a list of spans for the parts of the step; and `engines`, a list of spans per
engine for the activities that were reported since the previous row. A span is [begin, end, name],
in seconds after the row's `begin`. If a step was repeated, the last row of the step counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrl.run.json_lines import add_line
from mrl.system.files import write_whole
from mrl.system.json_text import check_kinds, parse_row

MAX_SECONDS = 1e11
"""Upper bound of valid times, in seconds since 1970."""
Spans = Iterable[tuple[float, float, str]]
"""Activities as (begin, end, name), with times in seconds since 1970."""


class Timeline:
    """The timeline.jsonl of a run folder. Only rank 0 writes it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, step: int, trainer: Spans, engines: Sequence[Spans]) -> None:
        """Add the row of a step.

        `trainer` has the spans of the trainer, at least one. `engines` has the spans of each
        engine.
        """
        trainer = list(trainer)
        begin = trainer[0][0]
        row = {
            "step": step,
            "begin": round(begin, 3),
            "trainer": _relative(trainer, begin),
            "engines": [_relative(spans, begin) for spans in engines],
        }
        add_line(self.file, row)

    def rewind(self, step: int) -> None:
        """Remove the rows of step `step` and of all later steps, because these steps will be
        repeated."""
        if self.file.exists():
            lines = self.file.read_bytes().splitlines(keepends=True)
            write_whole(self.file, [line for line in lines if step_of_row(line) in range(step)])

    def read(self) -> list[dict[str, Any]]:
        """Return the last row of each step, in the order of the steps. Invalid lines are left out."""
        if not self.file.exists():
            return []
        lines = self.file.read_bytes().splitlines()
        rows = {step_of_row(line): line for line in lines}
        return [json.loads(rows[step]) for step in sorted(rows) if step >= 0]


def _relative(spans: Spans, origin: float) -> list[list[Any]]:
    return [[round(begin - origin, 3), round(end - origin, 3), name] for begin, end, name in spans]


def step_of_row(line: bytes) -> int:
    """Return the step of a row; -1 if the line is not a valid row."""
    with suppress(ValueError):
        row = parse_row(line)
        kinds = {"step": "whole", "begin": "number", "trainer": "list", "engines": "list"}
        check_kinds(row, kinds, tuple(kinds))
        return row["step"] if 0 <= row["begin"] < MAX_SECONDS and row["step"] < 2**63 else -1
    return -1
