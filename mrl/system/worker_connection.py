"""The worker's side of its pipes: it receives requests and sends one reply to each.

Every reply carries the number of its request, so that no other line can be mistaken for it. The user's
code may fork, and the child may return from the call as if it were the worker: such a process is ended
here, before it replies to a request that the worker replies to as well.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

from mrl.system.processes import FORK_RETURNED, NUMBER, worker_pipes

FORK_RETURNED_CODE = 1
"""The exit code of a process that the user's code forked and that returned from the call."""


class WorkerConnection:
    """Yields requests, and sends the reply to the one that was yielded last."""

    def __init__(self, what: str, parent: int) -> None:
        """A worker creates this before anything else. `what` names the user's code, `parent` is the
        process that started the worker."""
        self._what = what
        self._requests, self._replies = worker_pipes(parent)
        self._pid = os.getpid()
        self._number: int | None = None
        self._fork_returned = mmap.mmap(-1, 1)
        """Memory shared with forked processes: one that returned from the call sets the byte. A file
        could be closed or changed by the user's code."""
        self._has_warned = False

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
            self._fork_returned[0] = 1
            os._exit(FORK_RETURNED_CODE)
        if self._fork_returned[0]:
            self._fork_returned[0] = 0
            self._warn()
            message = {**message, FORK_RETURNED: True}
        if self._number is not None:
            message = {**message, NUMBER: self._number}
        self._replies.write(json.dumps(message).encode() + b"\n")
        self._replies.flush()

    def _warn(self) -> None:
        """Warn about the first forked process that returned from the call."""
        if not self._has_warned:
            self._has_warned = True
            print(
                f"mrl: warning: {self._what} forked, and the child returned from the call as if it "
                "were the worker; it was ended. End a child of os.fork() with os._exit()",
                file=sys.stderr,
                flush=True,
            )
