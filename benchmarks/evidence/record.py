"""This module makes new results the committed ones: `python -m benchmarks.evidence --record`, with
`--only NAME` for those of a study.

A benchmark writes what it found to runs/results/, which Git ignores, so that whoever repeats a
measurement changes no file of the repository. Recording copies it to benchmarks/results/ and writes the
pages that are made from it: a benchmark's module has a function `pages(name, result)` for that, which
returns the new text of each file.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.evidence.catalog import Target
from benchmarks.evidence.digest import ROOT, digest, measured_files
from benchmarks.evidence.result import NEW, RESULTS, counts
from benchmarks.evidence.staleness import PAGE, marked, states

COUNTS = re.compile(r"\b\d+ passed, \d+ failed\b(?:, \d+ goals? missed\b)?")


@dataclass(frozen=True)
class Recorded:
    """What became of the new results."""

    lines: list[str] = field(default_factory=list)
    """A line for each result that was recorded, or passed over because the committed one is newer."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """Why the other results could not be recorded, by their names. Nothing of them was written."""


def record(targets: Sequence[Target], new: Path = NEW, committed: Path = RESULTS) -> Recorded:
    """Make the new results of `targets` the committed ones, write their pages, and mark the results.

    A target without a new result is passed over. If a result is damaged or its pages cannot be made,
    the others are still recorded.
    """
    recorded = Recorded()
    for target in targets:
        for name in target.results:
            if (new / f"{name}.json").is_file():
                try:
                    recorded.lines.append(record_one(target, name, new, committed))
                except Exception as error:  # of any kind: `pages` is the code of a benchmark
                    recorded.errors[name] = error
    mark(committed)
    return recorded


def record_one(target: Target, name: str, new: Path, committed: Path) -> str:
    """Record the new result `name`, and return a line that says so.

    Whatever is missing in the result, or is wrong in its pages, raises an exception before anything is
    written.
    """
    result = json.loads((new / f"{name}.json").read_text())
    old_date, date = _date(committed / f"{name}.json"), result["date"]
    if date < old_date:
        return (
            f"{name}: not recorded, because the new result is of {date} and the committed one of "
            f"{old_date}; remove {name}.json from {NEW.relative_to(ROOT)}, or repeat the measurement"
        )
    pages = pages_of(target, name, result)
    line = _line(name, result, pages)
    committed.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(new / f"{name}.json", committed / f"{name}.json")
    for page, text in pages.items():
        page.write_text(text)
    return line


def pages_of(target: Target, name: str, result: Mapping[str, Any]) -> dict[Path, str]:
    """Return the text of each file that is made from the result `name`: pages and plots of the docs,
    and the counts in docs/results.md."""
    module = importlib.import_module(target.arguments[0])
    made = module.pages(name, result) if hasattr(module, "pages") else {}
    return {**made, PAGE: with_counts(PAGE.read_text(), name, result)}


def with_counts(page: str, name: str, result: Mapping[str, Any]) -> str:
    """Return docs/results.md with the counts of `result` in the row that names it."""
    if "passed" not in result:
        return page
    new = counts(result["passed"], result["failed"], result.get("missed", 0))
    return "\n".join(
        COUNTS.sub(new, line, count=1) if f"`{name}.json`, " in line or f"`{name}.json` |" in line
        else line
        for line in page.split("\n")
    )  # fmt: skip


def mark(results: Path = RESULTS) -> bool:
    """Write into docs/results.md which results are stale. Return whether that changed it."""
    page = PAGE.read_text()
    new = marked(page, states(results))
    if new != page:
        PAGE.write_text(new)
    return new != page


def _date(file: Path) -> str:
    """Return the date of a committed result; empty where there is none."""
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found.get("date", "") if isinstance(found, dict) else ""


def _line(name: str, result: Mapping[str, Any], pages: Mapping[Path, str]) -> str:
    written = ", ".join(page.relative_to(ROOT).as_posix() for page in pages)
    line = f"{name}: recorded, and written into {written}"
    if result["commit"].endswith("+dirty"):
        line += "; it was made with changes that were not committed"
    elif digest(measured_files(result["measures"])) != result["digest"]:
        line += "; the code that it measures has changed since"
    return line
