"""The worker's end of its pipes: requests come in, and one reply to each goes out.

Every reply carries the number of its request, so that no other line can be taken for it. The user's
code may fork, and the child may come back from it as if it were the worker: such a process is ended
here, before it answers a request that the worker answers too.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

from mrl.system.processes import NUMBER, STRAY, worker_pipes

STRAY_CODE = 1
"""The exit code of a process that the user's code forked and that came back from it."""


class WorkerEnd:
    """Yields requests, and sends the reply to the one that was yielded last."""

    def __init__(self, what: str, parent: int) -> None:
        """A worker makes this first of all. `what` names the user's code, `parent` is the process that
        started the worker."""
        self._what = what
        self._requests, self._replies = worker_pipes(parent)
        self._pid = os.getpid()
        self._number: int | None = None
        self._stray = mmap.mmap(-1, 1)
        """Memory that forked processes share: one that came back sets the byte. A file would be open to
        whatever the user's code does to all of its files."""
        self._has_told = False

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield each request until the other side closes."""
        for line in self._requests:
            request = json.loads(line)
            self._number = request.pop(NUMBER)
            yield request

    def send(self, message: dict[str, Any]) -> None:
        """Send the reply to the last request. It does not return in a process that the user's code
        forked."""
        if os.getpid() != self._pid:
            self._stray[0] = 1
            os._exit(STRAY_CODE)
        if self._stray[0]:
            self._stray[0] = 0
            self._tell()
            message = {**message, STRAY: True}
        if self._number is not None:
            message = {**message, NUMBER: self._number}
        self._replies.write(json.dumps(message).encode() + b"\n")
        self._replies.flush()

    def _tell(self) -> None:
        """Warn of the first forked process that came back."""
        if not self._has_told:
            self._has_told = True
            print(
                f"mrl: warning: {self._what} forked, and the child came back from the call as the "
                "worker does; it was ended. Let a child of os.fork() end with os._exit()",
                file=sys.stderr,
                flush=True,
            )
