"""What a live page is: a state that a browser gets as a whole, and events that change it."""

from __future__ import annotations

import json
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from mrl.errors import InputError
from mrl.view.live.feed import Feed
from mrl.view.live.samples import Rollouts

MAX_EVENTS = 128
"""If a poll finds more rows than this, browsers get a message to fetch the whole state instead."""


class LivePage(ABC):
    """A page of a run, a service or a comparison. `poll` is called by one thread, and the other methods
    by any thread."""

    kind: str
    """`run`, `service` or `comparison`, for the scripts."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.feed = Feed()
        self.rollouts: Rollouts | None = None
        """The samples of the page; None if it has none."""
        self._problems: dict[str, str] = {}
        self._lock = threading.RLock()
        self._shown: dict[str, Any] = {}
        """The newest value of each kind of event that replaces a part of the page."""
        self._rows: list[tuple[str, Any]] = []
        self._is_new = False
        self._state: tuple[int, dict[str, Any]] | None = None

    def poll(self) -> None:
        """Read what is new in the files, and publish it. An error is shown on the page."""
        with self._lock:
            self._attempt(self.read)
            self._attempt(self._publish)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._problems.pop(call.__name__, None)
        except InputError as error:
            self._problems[call.__name__] = str(error)
        except Exception as error:
            if call.__name__ not in self._problems:
                traceback.print_exception(error)
            what = f"{type(error).__name__}: {error}"
            self._problems[call.__name__] = f"the page could not be updated: {what}"

    @property
    def problem(self) -> str:
        """Why the page could not be updated in the last poll; empty if it could."""
        return "; ".join(self._problems.values())

    def _publish(self) -> None:
        self._publish_rows()
        for kind, value in self.parts().items():
            if kind not in self._shown or self._shown[kind] != value:
                self._shown[kind] = value
                self.feed.publish(kind, value)

    @property
    def is_behind(self) -> bool:
        """Whether there are rows that were not read yet, as in a long log that is read for the first
        time."""
        return False

    @abstractmethod
    def read(self) -> None:
        """Read what is new. Raises InputError if a file is damaged."""

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """Return the parts of the page other than its curves, as JSON-able data. It must be cheap."""

    @abstractmethod
    def curves(self) -> dict[str, Any]:
        """Return all curves, as `metrics` of the page's data."""

    def add_row(self, row: dict[str, Any]) -> None:
        """Note an event `row`, which adds a step to the curves."""
        self._rows.append(("row", row))

    def start_over(self) -> None:
        """Note that browsers must get the whole state, because its curves have changed otherwise than
        by new rows."""
        self._is_new, self._rows = True, []

    def state(self) -> dict[str, Any]:
        """Return everything that the page shows now."""
        with self._lock:
            if self._state is None or self._state[0] != self.feed.number:
                live = {
                    "kind": self.kind,
                    "title": self.title,
                    "epoch": self.feed.epoch,
                    "number": self.feed.number,
                    **self._shown,
                }
                self._state = self.feed.number, {"metrics": self.curves(), "live": live}
            found = self._state[1]
            return {**found, "live": {**found["live"], "now": time.time()}}

    def _publish_rows(self) -> None:
        if self.is_behind:  # the whole state would change all the time
            self.start_over()
            return
        rows, self._rows = self._rows, []
        if self._is_new or len(rows) > MAX_EVENTS:
            self._is_new = False
            self.feed.publish("reset", {})
            return
        for kind, row in rows:
            self.feed.publish(kind, row)


def as_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
