"""Receives requests in a worker process, which runs user code, and sends replies to them.

Every reply carries the number of its request, so that no other line can be mistaken for a reply. The
user's code may fork, and the child may return from the call as if it were the worker. This module ends
such a child before it answers a request that the worker also answers.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mrl.system.processes import die_with_parent

FORK_RETURNED_CODE = 1
"""Exit code of a child that the user's code forked, and that returned from the user's function as
if it were the worker."""
NUMBER, FORK_RETURNED = "number", "stray"
"""Keys of messages. NUMBER is the number of a request, which the answer repeats. FORK_RETURNED is
true in an answer if a process that the user's code forked has returned from the call and was
ended."""


class WorkerConnection:
    """Yields the requests to this worker one by one, or all that have come, and sends replies."""

    def __init__(self, what: str, parent: int) -> None:
        """Take over the worker's standard input and output. A worker does this before anything else.

        `what` names the user's code, and `parent` is the PID of the process that started the
        worker.
        """
        self._what = what
        self._requests, self._replies = worker_pipes(parent)
        self._pid = os.getpid()
        self._number: int | None = None
        self._fork_returned = mmap.mmap(-1, 1)
        """A byte shared with forked processes, which is 1 if one of them returned from the call. It is
        not in a file, which the user's code could close or change."""
        self._has_warned = False
        self._unread = b""

    def fileno(self) -> int:
        """Return the file descriptor that is readable when requests have come, for event loops."""
        return self._requests.fileno()

    def receive(self) -> list[tuple[int, dict[str, Any]]] | None:
        """Return the requests that have come, each with its number, and None if the process that sends
        them has closed its pipe. Call this when `fileno` is readable; replies then carry a number.

        In a process that the user's code forked, read nothing and exit.
        """
        if os.getpid() != self._pid:
            os._exit(FORK_RETURNED_CODE)
        chunk = os.read(self.fileno(), 1 << 20)
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        requests = [json.loads(line) for line in lines]
        return [(request.pop(NUMBER), request) for request in requests]

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield each request until the process that sends them closes its pipe."""
        for line in self._requests:
            request = json.loads(line)
            self._number = request.pop(NUMBER)
            yield request

    def send(self, message: dict[str, Any], number: int | None = None) -> None:
        """Send the reply to a request: to request `number`, or to the one that `requests` yielded last.
        If there was none, this sends the worker's first line.

        In a process that the user's code forked, send nothing and exit.
        """
        if os.getpid() != self._pid:
            self._fork_returned[0] = 1
            os._exit(FORK_RETURNED_CODE)
        if self._fork_returned[0]:
            self._fork_returned[0] = 0
            self._warn()
            message = {**message, FORK_RETURNED: True}
        number = self._number if number is None else number
        if number is not None:
            message = {**message, NUMBER: number}
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


def worker_pipes(parent: int) -> tuple[BinaryIO, BinaryIO]:
    """Return the worker's standard input and output as two streams, for requests and for replies.

    A worker calls this before it loads the user's code. That code then has no standard input, and
    what it prints goes to stderr. The worker dies with process `parent`, even if that process is
    killed with SIGKILL while the user's code hangs. If memory runs out, Linux kills the worker
    before the trainer, although the trainer uses more memory.
    """
    die_with_parent(parent)
    # SLURM may send SIGUSR1 to every process of a job to make the ranks save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, replies


def describe(error: BaseException) -> str:
    """Describe an error of user code in one line of bounded length that can always be printed."""
    try:
        text = " ".join(str(error).split())[:500]
    except Exception as inner:  # user code again
        text = f"its str() raises {type(inner).__name__}"
    # An unpaired surrogate cannot be written to a file or to stdout.
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()
