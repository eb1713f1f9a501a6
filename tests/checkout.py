"""Finds what a test run leaves behind in the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

TOP_LEVEL = frozenset(
    {
        *(".ci", ".gitignore", "LICENSE", "Makefile", "mkdocs.yml"),
        *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
        *("pyproject.toml", "setup.py", "requirements"),
        *("csrc", "mrl", "parallel", "moe", "launch", "tests", "docs", "benchmarks", "studies"),
    }
)
"""What may be tracked at the top of the checkout."""
RUN_FOLDERS = ("runs", "toy")
"""What git ignores, and commands write by default where they are started."""
SOURCES = frozenset(
    {".py", ".md", ".c", ".cpp", ".cu", ".cuh", ".h", ".html", ".js", ".css", ".sh", ".toml"}
)
"""Suffixes of what people write below the top level while tests run."""


def tracked_top_level(root: Path) -> set[str] | None:
    """Return the names that git tracks at the top of `root`; None where that is no checkout."""
    files = _git(root, "ls-files")
    return None if files is None else {line.partition("/")[0] for line in files}


def left_files(root: Path) -> set[str]:
    """Return what is in a checkout and belongs to no commit: untracked files, less sources that
    somebody may be writing, and the folders of runs. Nothing where `root` is no checkout."""
    lines = _git(root, "ls-files", "--others", "--exclude-standard")
    if lines is None:
        return set()
    untracked = {line for line in lines if "/" not in line or Path(line).suffix not in SOURCES}
    folders = (root / name for name in RUN_FOLDERS)
    return untracked | {f"{f.name}/{e.name}" for f in folders if f.is_dir() for e in f.iterdir()}


def _git(root: Path, *words: str) -> list[str] | None:
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "-c", "core.quotePath=false", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else None
