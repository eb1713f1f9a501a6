"""This module writes what a benchmark found to runs/results/, with the code that it ran.

`benchmarks.evidence.record` makes it the committed result, in benchmarks/results/.

Every result file begins with the same fields:

machine, versions   the processor and the installed packages, in words
date                the day on which it was made
commit              the commit that was checked out, with `+dirty` where a measured file was not as in
                    it. Where there is no `digest`, it is the commit that recorded the file.
measures            the files that the figures depend on (patterns of `benchmarks.evidence.catalog`)
digest              of these files (`benchmarks.evidence.digest`); where it changes, the result is stale
passed, failed      how many checks passed and failed
missed              how many goals of speed were not reached; absent where none was missed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from benchmarks.evidence.catalog import target_of
from benchmarks.evidence.digest import ROOT, digest, measured_files
from benchmarks.evidence.git import git
from benchmarks.evidence.machine import describe

RESULTS = ROOT / "benchmarks" / "results"
"""The committed results."""
NEW = ROOT / "runs" / "results"
"""The results of the newest run of each benchmark in this checkout."""
CPU = torch.device("cpu")


def write_result(
    name: str,
    content: Mapping[str, Any],
    *,
    passed: int | None,
    failed: int | None,
    missed: int = 0,
    packages: Sequence[str] = ("torch",),
    device: torch.device = CPU,
    path: Path | None = None,
) -> dict[str, Any]:
    """Write `content` and where it comes from to `path`, by default runs/results/NAME.json.

    `passed` and `failed` are None for a sweep, which has no checks. Returns the whole result as it was
    written. Raises KeyError where no target of the catalog writes
    a result of this name.
    """
    result = {
        **describe(device, packages),
        "date": datetime.now(UTC).date().isoformat(),
        **provenance(target_of(name).measures),
        **({} if passed is None else {"passed": passed, "failed": failed}),
        **({"missed": missed} if missed else {}),
        **content,
    }
    file = path or NEW / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    text = text.replace(f"{ROOT}/", "")  # a result says nothing about where the clone lies
    file.write_text(text + "\n")
    if path is None:
        print(
            f"written: {file.relative_to(ROOT)}; `python -m benchmarks.evidence --record --only "
            f"{target_of(name).name}` makes it the committed result"
        )
    return json.loads(text)


def counts(passed: int, failed: int, missed: int = 0) -> str:
    """Return the plain line that every benchmark ends with."""
    goals = f", {missed} goal{'s' * (missed > 1)} missed" if missed else ""
    return f"{passed} passed, {failed} failed{goals}"


def finish(passed: int, failed: int, missed: int = 0) -> NoReturn:
    """Print the plain line, and exit with 1 where a check failed."""
    print(counts(passed, failed, missed))
    sys.exit(failed > 0)


def summary(docstring: str | None) -> str:
    """Return the first paragraph of a module's docstring, for the help of its command."""
    return " ".join((docstring or "").split("\n\n")[0].split())


def between_markers(text: str, name: str, content: str) -> str:
    """Return `text` with `content` between `<!-- name -->` and `<!-- /name -->`.

    Raises ValueError if `text` does not have the two markers.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"expected {start} and {end} in the document")
    return f"{before}{start}\n{content}\n{end}{after}"


def provenance(patterns: Sequence[str]) -> dict[str, Any]:
    """Return the commit, the patterns and the digest of the code that this process runs."""
    files = measured_files(patterns)
    return {
        "commit": commit_now(list(files)),
        "measures": list(patterns),
        "digest": digest(files),
    }


def commit_now(files: Sequence[str]) -> str:
    """Return the commit that is checked out; `+dirty` where one of `files` is not as in that commit.

    A file that was changed after this process had started counts as well, because the process may have
    read it before. Outside of a Git checkout the commit is `unknown`.
    """
    head = git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changed = git("status", "--porcelain", "--", *files)
    start = psutil.Process().create_time() + 1.0  # psutil knows the boot time in whole seconds only
    during = any((ROOT / file).stat().st_mtime > start for file in files)
    return head.decode().strip() + ("+dirty" if changed or during else "")
