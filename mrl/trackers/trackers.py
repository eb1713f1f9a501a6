"""This module runs all trackers of a run, and keeps in trackers.json how far each has come."""

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
"""The key of trackers.json that says which folder the runs belong to."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for its trackers, all together."""


class Trackers:
    """Holds the trackers of a run on rank 0. Other ranks have none, and their calls do nothing."""

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
        """Start all trackers in a run of which `step` steps are done, and metrics.jsonl has no more.

        A tracker that is behind, or new in this run, gets the steps that it lacks. Returns at once.
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
        if not here.items() & there.items():  # neither the place, nor moved there
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
        """Let the trackers have what is new in metrics.jsonl. Returns at once."""
        for follower in self.followers:
            follower.follow()

    def close(self, *, failed: bool, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the run in every service, and warn of steps that did not arrive within `timeout_s`."""
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
        """Keep how far a tracker has come; its follower's thread calls this."""
        with self._lock:
            self._state[name] = asdict(progress)
            write_whole(self._file, json.dumps(self._state, indent=1) + "\n")


def _identity(folder: Path) -> dict[str, str]:
    """Return what tells a run folder from its copy: a folder that was moved keeps its inode, and one
    that another machine mounts keeps its path."""
    found = folder.stat()
    return {"path": str(folder.resolve()), "inode": f"{found.st_dev}:{found.st_ino}"}
