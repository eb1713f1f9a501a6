"""A follower sends one tracker what metrics.jsonl holds, in a thread of its own.

The step never waits for a tracker. What a tracker refuses is still in the run folder: the follower
closes it, starts it anew after a pause, and sends the steps that it lacks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mrl.errors import InputError
from mrl.run.folder import RunFolder
from mrl.trackers.base import SAMPLE_COLUMNS, Run, Tracker

RETRY_S = 30.0
"""Seconds until a tracker that failed is tried again."""

Save = Callable[[str, "Progress"], None]
"""Keeps for the next start of the run how far the tracker of a name has come."""


@dataclass(frozen=True)
class Progress:
    """A `Progress` says how far a tracker has come, as trackers.json has it."""

    run_id: str | None = None
    next_step: int = 0


class Follower:
    """Runs one tracker in a daemon thread, from `start` to `close`."""

    def __init__(
        self,
        name: str,
        make: Callable[[Run], Tracker],
        run: Run,
        folder: RunFolder,
        save: Save,
        warn: Callable[[str], None],
    ) -> None:
        self.name = name
        self.progress = Progress()
        self.failure: str | None = None
        """What the tracker failed with last; None once it has caught up."""
        self._make, self._run, self._folder = make, run, folder
        self._save, self._warn = save, warn
        self._wake = threading.Condition()
        self._news, self._closing, self._failed = False, False, False
        self._has_warned = False
        self._offset = 0
        """Bytes of metrics.jsonl that the tracker has, or had before its last start."""
        self._thread = threading.Thread(target=self._loop, name=f"mrl-{name}", daemon=True)

    def start(self, progress: Progress) -> None:
        """Begin with the steps from `progress.next_step` on."""
        self.progress = progress
        self._news = True
        self._thread.start()

    def follow(self) -> None:
        """Note that metrics.jsonl has grown. Returns at once."""
        with self._wake:
            self._news = True
            self._wake.notify()

    def close(self, *, failed: bool) -> None:
        """Send what is left and end the run in the service; `join` waits for it."""
        with self._wake:
            self._news = self._closing = True
            self._failed = failed
            self._wake.notify()

    def join(self, deadline: float) -> bool:
        """Wait until the tracker has ended, or time.monotonic() reaches `deadline`; return which."""
        if self._thread.ident is None:
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _loop(self) -> None:
        tracker: Tracker | None = None
        retry_at = 0.0
        while True:
            with self._wake:
                while not (self._news and (self._closing or time.monotonic() >= retry_at)):
                    self._wake.wait(self._pause(retry_at))
                self._news, closing = False, self._closing
            try:
                tracker = tracker or self._start_tracker()
                self._send(tracker)
                if closing:
                    tracker.close(failed=self._failed)
            except Exception as error:  # the service, the network or the disk: anything can happen
                self._note(error)
                _close_quietly(tracker)
                tracker, retry_at = None, time.monotonic() + RETRY_S
                with self._wake:
                    self._news = True
            if closing:
                return

    def _pause(self, retry_at: float) -> float | None:
        """Return the seconds until there may be something to do; None: until someone calls."""
        return max(0.0, retry_at - time.monotonic()) if self._news else None

    def _start_tracker(self) -> Tracker:
        tracker = self._make(self._run)
        try:
            started = tracker.start(self.progress.run_id, self.progress.next_step)
        except BaseException:
            _close_quietly(tracker)
            raise
        self._offset = 0
        self._keep(started.run_id, started.next_step)
        return tracker

    def _send(self, tracker: Tracker) -> None:
        """Log every step that the tracker lacks."""
        config = self._run.config
        for row in self._rows():
            step = int(row["step"])
            if step < self.progress.next_step:
                continue
            numbers = {k: v for k, v in row.items() if k != "step" and v is not None}
            time_s = float(row.get("time/timestamp") or time.time())
            if config.samples_per_step and step % config.samples_every == 0:
                rows = self._samples(step)
                if rows:
                    tracker.log_samples(step, rows, time_s)
            tracker.log(step, numbers, time_s)
            tracker.flush()
            self._keep(self.progress.run_id, step + 1)
        self.failure = None

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Return the whole lines of metrics.jsonl that were not read yet, in order."""
        if not self._folder.metrics.exists():
            return
        with self._folder.metrics.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)
                    self._offset += len(line)  # after the row has arrived

    def _samples(self, step: int) -> list[dict[str, Any]]:
        """Return samples of a step, spread evenly over its groups; none if the file is missing or
        damaged, which another attempt would not change."""
        if not self._folder.rollout_file(step).exists():
            return []
        try:
            rows = self._folder.read_rollouts(step)
        except InputError as error:
            self._warn(f"logging: {self.name} gets no samples of step {step}: {error}")
            return []
        count = min(self._run.config.samples_per_step, len(rows))
        chosen = (rows[i * len(rows) // count] for i in range(count))
        return [{key: row.get(key) for key in SAMPLE_COLUMNS} for row in chosen]

    def _keep(self, run_id: str | None, next_step: int) -> None:
        self.progress = Progress(run_id, next_step)
        self._save(self.name, self.progress)

    def _note(self, error: Exception) -> None:
        """Warn once; how many steps are missing in the end is reported when the run closes."""
        self.failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"logging: {self.name} failed ({self.failure}); the run continues, {self.name} is "
                f"tried again every {RETRY_S:g} s, and metrics.jsonl has everything"
            )


def _close_quietly(tracker: Tracker | None) -> None:
    """Close a tracker that has failed: whatever this raises has the same cause."""
    if tracker is None:
        return
    try:
        tracker.close(failed=True)
    except Exception:
        return
