"""Send the rows of metrics.jsonl to one tracker, in a thread of its own.

Training never waits for a tracker. If a tracker fails, the follower closes it, starts it again
after a pause, and sends the missing steps, which are still in the run folder.
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
"""Seconds until a tracker that failed is started again."""

Save = Callable[[str, "Progress"], None]
"""A function that saves the progress of the tracker with the given name, for the next start of the
run."""


@dataclass(frozen=True)
class Progress:
    """The state of a tracker in trackers.json: its run in the service, and the next step to send."""

    run_id: str | None = None
    next_step: int = 0


class Follower:
    """Runs one tracker in a daemon thread between `start` and `close`."""

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
        """The tracker's last error; None if there was none. Reset to None when the tracker has
        received all steps so far."""
        self._make, self._run, self._folder = make, run, folder
        self._save, self._warn = save, warn
        self._wake = threading.Condition()
        self._news, self._closing, self._failed = False, False, False
        self._has_warned = False
        self._offset = 0
        """The byte offset in metrics.jsonl of the first row that was not yet sent to the current
        tracker."""
        self._thread = threading.Thread(target=self._loop, name=f"mrl-{name}", daemon=True)

    def start(self, progress: Progress) -> None:
        """Start the thread. It begins by sending step `progress.next_step`."""
        self.progress = progress
        self._news = True
        self._thread.start()

    def follow(self) -> None:
        """Wake the thread, because metrics.jsonl has new rows. Returns at once."""
        with self._wake:
            self._news = True
            self._wake.notify()

    def close(self, *, failed: bool) -> None:
        """Tell the thread to send the remaining steps and to end the run in the service.

        This returns at once; `join` waits for the thread.
        """
        with self._wake:
            self._news = self._closing = True
            self._failed = failed
            self._wake.notify()

    def join(self, deadline: float) -> bool:
        """Wait until the thread has ended, and return whether it has.

        deadline: the value of time.monotonic() at which the wait ends at the latest.
        """
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
            except Exception as error:  # any error of the service, the network or the disk
                self._note(error)
                _close_quietly(tracker)
                tracker, retry_at = None, time.monotonic() + RETRY_S
                with self._wake:
                    self._news = True
            if closing:
                return

    def _pause(self, retry_at: float) -> float | None:
        """Return the seconds that the thread must wait; None to wait for `follow` or `close`.

        retry_at: the value of time.monotonic() before which nothing may be sent.
        """
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
        """Log all complete rows of metrics.jsonl that the tracker does not have yet."""
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
        """Yield the complete rows of metrics.jsonl that have not been sent yet, in order."""
        if not self._folder.metrics.exists():
            return
        with self._folder.metrics.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)
                    self._offset += len(line)  # reached once the caller has sent the row

    def _samples(self, step: int) -> list[dict[str, Any]]:
        """Return samples of a step, spread evenly over its groups.

        Returns [] if the file of rollouts is missing or damaged. This is not an error, because
        another attempt would not help.
        """
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
        """Record the error, and warn about the first error.

        Steps that are still missing at the end are reported when the trackers are closed.
        """
        self.failure = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"logging: {self.name} failed ({self.failure}); the run continues, {self.name} is "
                f"tried again every {RETRY_S:g} s, and metrics.jsonl has everything"
            )


def _close_quietly(tracker: Tracker | None) -> None:
    """Close a tracker that has failed, and ignore errors, which probably have the same cause."""
    if tracker is None:
        return
    try:
        tracker.close(failed=True)
    except Exception:
        return
