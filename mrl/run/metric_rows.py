"""Checks the rows of metrics.jsonl that a resumed run continues, and restores missing or changed ones.

Every checkpoint has a copy of the rows of the steps before it. If metrics.jsonl was cut, edited or
damaged since then, it is rebuilt from the copy. Checkpoints of earlier versions of mrl have no
copy; for them the only check is whether every step has a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.system.files import write_whole
from mrl.system.json_text import check_kinds, parse_row
from parallel.checkpoint.manifest import Damaged, read_manifest, record

COPY = "metrics.jsonl"
"""The name of the copy of metrics.jsonl in a checkpoint's folder."""


def rows_before(metrics: Path, step: int) -> bytes:
    """Return the first `step` lines of metrics.jsonl; empty if the file does not exist.

    The checkpoint of `step` keeps a copy of these lines.
    """
    with suppress(FileNotFoundError):
        return b"".join(metrics.read_bytes().splitlines(keepends=True)[:step])
    return b""


def read(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl. If a crash cut the last line short, it is left out.

    The list is empty if the file does not exist. Raises InputError if a line is damaged.
    """
    if not metrics.exists():
        return []
    rows = []
    for number, line in enumerate(metrics.read_bytes().split(b"\n")[:-1], 1):
        try:
            rows.append(parsed(line))
        except ValueError as error:
            raise InputError(
                f"{metrics}:{number}: the line is damaged ({error}); `mrl train {metrics.parent}` "
                "restores the rows from the newest checkpoint, which has a copy"
            ) from None
    return rows


def parsed(line: bytes) -> dict[str, Any]:
    """Return the row in a line of metrics.jsonl.

    The value of `step` must be an integer of at least 0, and all other values must be numbers or
    null. For any other line, raises ValueError with a message that says what is wrong.
    """
    row = parse_row(line)
    check_kinds(row, {"step": "whole"}, required=("step",))
    check_kinds(row, dict.fromkeys(row, "number|null"))
    if not 0 <= row["step"] < 2**63:
        raise ValueError(f"`step` is {row['step']}")
    return row


def find_damage(metrics: Path, checkpoint: Path, step: int) -> str:
    """Return a one-line description of the damage in the rows of the first `step` steps.

    The description is empty if the rows are intact. Raises InputError if rows are damaged and
    `checkpoint` has no copy from which to repair them.
    """
    data = metrics.read_bytes() if metrics.exists() else b""
    copy = _copy_of(checkpoint)
    if copy is not None and data.startswith(copy):
        return ""
    wrong = _wrong(data, range(step) if copy is None else _steps(copy), copy)
    if copy is None and wrong:
        raise InputError(
            f"{metrics}: {wrong}, and checkpoint {checkpoint.name} has no copy of the rows, as an "
            "earlier version of mrl wrote it; restore the file, set the run back to a step before "
            "them (docs/checkpoints.md), or start another run in a new output_dir"
        )
    if not wrong:
        return "" if copy is None else f"{metrics}: the rows are in another order"
    return f"{metrics}: {wrong}"


def mend(metrics: Path, checkpoint: Path, step: int) -> None:
    """Replace the rows of the first `step` steps with the checkpoint's copy if they are damaged.

    Readable rows of later steps are kept. The old file is kept as `metrics.jsonl.damaged`. Nothing
    is changed if `find_damage` finds no damage.
    """
    if not find_damage(metrics, checkpoint, step):
        return
    copy, data = _copy_of(checkpoint) or b"", b""
    if metrics.exists():
        data = metrics.read_bytes()
        write_whole(metrics.with_name(f"{metrics.name}.damaged"), data)
    later = [line + b"\n" for line in data.split(b"\n")[:-1] if (_step(line) or 0) >= step]
    write_whole(metrics, [copy, *later], durable=True)


def _copy_of(checkpoint: Path) -> bytes | None:
    """Return the checkpoint's copy of the rows; None if there is no copy or the copy is damaged."""
    try:
        listed = read_manifest(checkpoint)["files"].get(COPY)
        if listed is None or record(checkpoint / COPY).sha256 != listed["sha256"]:
            return None
        return (checkpoint / COPY).read_bytes()
    except (Damaged, OSError):
        return None


def _wrong(data: bytes, steps: Iterable[int], copy: bytes | None) -> str:
    """Return text that names the `steps` whose rows in `data` are missing or differ from `copy`.

    The text is empty if no row is missing or different. Without a `copy`, rows can only be missing.
    """
    lines = data.split(b"\n")[:-1]
    there = {step: line for line in lines if (step := _step(line)) is not None}
    kept = {} if copy is None else {_step(line): line for line in copy.split(b"\n")[:-1]}
    missing = [step for step in steps if step not in there]
    changed = [
        step for step in steps if step in there and kept.get(step, there[step]) != there[step]
    ]
    num_damaged = sum(_step(line) is None for line in lines)
    parts = [
        f"the row{_of_steps(missing)} missing" if missing else "",
        f"the row{_of_steps(changed)} changed since the checkpoint was saved" if changed else "",
        f"{num_damaged} line(s) cannot be read" if num_damaged and missing else "",
    ]
    return ", ".join(part for part in parts if part)


def _steps(copy: bytes) -> list[int]:
    return [step for line in copy.split(b"\n")[:-1] if (step := _step(line)) is not None]


def _step(line: bytes) -> int | None:
    """Return the step of a row; None if the line is damaged."""
    with suppress(ValueError):
        return parsed(line)["step"]
    return None


def _of_steps(steps: list[int]) -> str:
    """Return the text after `row` in a message, such as ` of step 3 is` or `s of steps 2 to 5, 9
    are`."""
    if len(steps) == 1:
        return f" of step {steps[0]} is"
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"s of steps {', '.join(words[:5])}{' and others' if len(words) > 5 else ''} are"
