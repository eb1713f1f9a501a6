"""Moves files of a run folder out of the way, into `dropped_0/` next to them (then `dropped_1/`...)."""

from __future__ import annotations

import itertools
from pathlib import Path


def step_of_file(file: Path) -> int:
    """Return the step in a file name such as `step_000012.jsonl`; -1 for any other name."""
    number = file.name.removeprefix("step_").partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() else -1


def set_aside(folder: Path, step: int) -> None:
    """Move the files of step `step` and of all later steps to a new folder `dropped_N`."""
    dropped = [f for f in folder.glob("step_*") if step_of_file(f) >= step]
    if not dropped:
        return
    new = new_aside(folder)
    for file in dropped:
        file.rename(new / file.name)


def new_aside(folder: Path) -> Path:
    """Make the folder `dropped_N` in `folder`, with the first free number N, and return its path."""
    aside = (folder / f"dropped_{n}" for n in itertools.count())
    new = next(path for path in aside if not path.exists())
    new.mkdir()
    return new
