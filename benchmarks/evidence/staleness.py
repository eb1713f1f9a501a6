"""This module tells which results are out of date, and marks them in docs/results.md.

A result is current while the digest of the code that it measures is the one that it was made with
(`benchmarks.evidence.digest`), and stale afterwards, until its command is run again. A result without a
digest was recorded before digests were kept, and counts as stale. A study (`Target.is_study`) is never
stale: it answered a question with the code of its commit.

The page says so beside every result, and a test compares the page with the code: who changes measured
code either repeats the measurement or lets `python -m benchmarks.evidence --mark` write that the
figures are of older code. A result that is marked as stale already needs nothing more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.evidence.catalog import TARGETS, Target
from benchmarks.evidence.digest import (
    ROOT,
    SUFFIXES,
    definitions,
    digest,
    matches,
    measured_files,
)
from benchmarks.evidence.git import git
from benchmarks.evidence.result import counts

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
COLUMNS = ("result", "made by", "at commit", "on", "checks")
CODE = "the code that it measures"


@dataclass(frozen=True)
class State:
    """One result file, and whether the code that it measures is still the same."""

    name: str
    target: Target
    commit: str
    """The commit at which it was made, with `+dirty` if measured files differed from it."""
    date: str
    """The day on which it was made."""
    checks: str
    """`N passed, N failed`, and what goals were missed; empty in files that do not hold it."""
    num_failed: int
    why: str
    """Why it is stale; empty where it is current, or a study's."""

    @property
    def short_commit(self) -> str:
        """The first seven digits of the commit, with the mark of a changed tree."""
        commit, plus, dirty = self.commit.partition("+")
        return commit[:7] + plus + dirty


def states(results: Path = RESULTS, root: Path = ROOT) -> list[State]:
    """Return the state of every result that the catalog names and that is on file."""
    return [
        _state(name, target, json.loads(file.read_text()), root)
        for target in TARGETS
        for name in target.results
        if (file := results / f"{name}.json").exists()
    ]


def _state(name: str, target: Target, result: dict[str, Any], root: Path) -> State:
    why = ""
    if target.is_study:
        pass
    elif "digest" not in result:
        why = "recorded before digests were kept"
    elif list(target.measures) != result["measures"]:
        why = "the catalog names other files now"
    elif digest(measured_files(target.measures, root)) != result["digest"]:
        why = "changed since"
    checks = ""
    if "passed" in result:
        checks = counts(result["passed"], result["failed"], result.get("missed", 0))
    return State(
        name, target, result["commit"], result["date"], checks, result.get("failed", 0), why
    )


def tables(found: Iterable[State]) -> dict[str, str]:
    """Return the two tables of docs/results.md in Markdown, by the names of their markers."""
    rows: dict[bool, list[tuple[str, ...]]] = {False: [(*COLUMNS, CODE)], True: [COLUMNS]}
    for s in found:
        cells = (f"`{s.name}.json`", f"`{s.target.name}`", s.short_commit, s.date, s.checks)
        code = () if s.target.is_study else (f"**stale**: {s.why}" if s.why else "is the same",)
        rows[s.target.is_study].append((*cells, *code))
    lines = {key: [f"| {' | '.join(row)} |" for row in own] for key, own in rows.items()}
    for own, cells in zip(lines.values(), rows.values(), strict=True):
        own.insert(1, "|---" * len(cells[0]) + "|")
    return {"how current": "\n".join(lines[False]), "studies": "\n".join(lines[True])}


def marked(page: str, found: Iterable[State]) -> str:
    """Return the page with its tables replaced. Raises ValueError where it has no place for them."""
    for name, table in tables(found).items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, has_start, rest = page.partition(start)
        _, has_end, after = rest.partition(end)
        if not has_start or not has_end:
            raise ValueError(f"{PAGE.relative_to(ROOT)}: expected the lines {start} and {end}")
        page = f"{before}{start}\n{table}\n{end}{after}"
    return page


def age(state: State) -> str:
    """Return the days and commits since the result was made; days alone where this clone does not have
    the commit."""
    days = (datetime.now(UTC).date() - date.fromisoformat(state.date)).days
    commit = state.commit.partition("+")[0]
    counted = git("rev-list", "--count", f"{commit}..HEAD")
    commits = "" if counted is None else f", {counted.decode().strip()} commits"
    return f"{days} days{commits}"


def changed_files(state: State) -> list[str] | None:
    """Return the measured files with a definition that was nowhere in the commit of the result.

    None where this clone does not have the commit. The list is empty where definitions were only
    removed.
    """
    commit = state.commit.partition("+")[0]
    old = definitions_at(commit)
    if old is None:
        return None
    files = measured_files(state.target.measures)
    return [path for path, content in files.items() if definitions(path, content) - old]


@cache
def definitions_at(commit: str) -> frozenset[str] | None:
    """Return all definitions of a commit; None where this clone does not have it."""
    files = files_at(commit, [""])
    if files is None:
        return None
    return frozenset(part for path, content in files.items() for part in definitions(path, content))


def files_at(commit: str, patterns: Sequence[str]) -> dict[str, bytes] | None:
    """Return the files of a commit that `patterns` name; None where this clone does not have it.

    The pattern "" names every file that could be measured.
    """
    listed = git("ls-tree", "-r", "--name-only", "-z", f"{commit}^{{commit}}")
    if listed is None:
        return None
    paths = [
        path
        for path in listed.decode().split("\0")
        if path.endswith(SUFFIXES) and any(not p or matches(path, p) for p in patterns)
    ]
    asked = "".join(f"{commit}:{path}\n" for path in paths).encode()
    packed = git("cat-file", "--batch", given=asked)
    if packed is None:
        return None
    files, at = {}, 0
    for path in paths:
        end = packed.index(b"\n", at)
        size = int(packed[at:end].split()[-1])
        files[path] = packed[end + 1 : end + 1 + size]
        at = end + size + 2
    return files
