"""Checks what a run continues from: its newest checkpoint, and the rows of the steps before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from mrl.run import metric_rows
from mrl.run.folder import RunFolder
from parallel.checkpoint.manifest import candidates, damage, newest_good, step_of


def resume_step(folder: RunFolder, warn: Callable[[str], None]) -> int | None:
    """Return the newest checkpoint that is all there. The ranks share the hashing when they load it.

    Rows of metrics.jsonl that the start brings back are reported. Raises InputError where it cannot.
    """
    found = newest_good(candidates(folder.checkpoints), partial(damage, digests=False), warn)
    if found is None:
        return None
    step = step_of(found)
    if os.environ.get("RANK", "0") == "0" and (
        wrong := metric_rows.find_damage(folder.metrics, found, step)
    ):
        warn(f"{wrong}; training continues with the copy in checkpoint {found.name}")
    return step
