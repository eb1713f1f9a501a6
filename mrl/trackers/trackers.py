"""All trackers of a run, and the file trackers.json with the progress of each tracker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrl.config import Recipe
from mrl.run import console
from mrl.run.folder import RunFolder
from mrl.system.files import write_whole
from mrl.system.json_text import check_kinds, parse_row
from mrl.trackers.base import JSONL, Run, load_tracker
from mrl.trackers.follower import Follower, Progress

FOLDER = "run_folder"
"""The key of trackers.json whose value identifies the run folder."""
CLOSE_TIMEOUT_S = 60.0
"""The seconds to wait for all trackers together at the end of a run."""


class Trackers:
    """The trackers of a run. Only rank 0 has trackers; on other ranks all methods do nothing."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        is_main: bool = True,
        warn: Callable[[str], None] = console.warning,
    ) -> None:
        self._file = folder.root / "trackers.json"
        self._folder, self._warn = folder, warn
        self._lock = threading.Lock()
        run = Run(folder.root, recipe.logging, recipe.model_dump(mode="json"))
        names = [name for name in recipe.logging.trackers if name != JSONL] if is_main else []
        self.followers = [
            Follower(name, load_tracker(name), run, folder, self._save, warn) for name in names
        ]
        self._state: dict[str, Any] = {}

    def start(self, step: int) -> None:
        """Start all trackers of a run that has done `step` steps. Returns at once.

        metrics.jsonl must have no rows of later steps. A tracker that is new in this run, or that
        has received fewer steps, gets the missing steps.
        """
        if not self.followers:
            return
        try:
            self._state = parse_row(self._file.read_bytes()) if self._file.exists() else {}
            check_kinds(self._state, dict.fromkeys(self._state, "object"))
            for progress in (self._state.get(each.name, {}) for each in self.followers):
                check_kinds(progress, {"run_id": "text|null", "next_step": "whole"})
        except (OSError, ValueError) as error:
            self._warn(f"logging: {self._file} cannot be read ({error}); trackers begin new runs")
            self._state = {}
        here = _identity(self._folder.root)
        there = self._state.get(FOLDER, here)
        if not here.items() & there.items():  # neither the same path nor the same inode
            self._warn(
                f"logging: {self._folder.root} is a copy of {there['path']}; its trackers begin runs "
                "of their own, with all steps"
            )
            self._state = {}
        self._state[FOLDER] = here
        for follower in self.followers:
            saved = Progress(**self._state.get(follower.name, {}))
            follower.start(Progress(saved.run_id, min(saved.next_step, step)))

    def follow(self) -> None:
        """Make the trackers send the new rows of metrics.jsonl. Returns at once."""
        for follower in self.followers:
            follower.follow()

    def close(self, *, failed: bool, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the run in every service, and warn about steps that were not sent within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for follower in self.followers:
            follower.close(failed=failed)
        for follower in self.followers:
            has_ended = follower.join(deadline)
            if has_ended and follower.failure is None:
                continue
            why = follower.failure if has_ended else f"it hangs, for more than {timeout_s:g} s"
            num = sum(
                row["step"] >= follower.progress.next_step for row in self._folder.read_metrics()
            )
            self._warn(
                f"logging: {follower.name} lacks the last {num} of the steps ({why}); a later start of "
                "this run sends them"
            )

    def _save(self, name: str, progress: Progress) -> None:
        """Save the progress of the tracker `name`. Called in the thread that sends the metrics to
        this tracker."""
        with self._lock:
            self._state[name] = asdict(progress)
            write_whole(self._file, json.dumps(self._state, indent=1) + "\n")


def _identity(folder: Path) -> dict[str, str]:
    """Return a run folder's path and inode. Together they distinguish the folder from a copy.

    A copy has another path and another inode. A folder that was moved keeps its inode, and a folder
    that another machine mounts keeps its path.
    """
    found = folder.stat()
    return {"path": str(folder.resolve()), "inode": f"{found.st_dev}:{found.st_ino}"}
