"""The worker's side of its pipes: it receives requests and sends one reply to each.

Every reply carries the number of its request, so that no other line can be mistaken for it. The user's
code may fork, and the child may return from the call as if it were the worker: such a process is ended
here, before it replies to a request that the worker replies to as well.
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
"""The exit code of a process that the user's code forked and that returned from the call."""
NUMBER, FORK_RETURNED = "number", "stray"
"""Keys of messages: the number of a request, which its answer repeats; and in an answer, whether a
process that the user's code forked returned from the call and was ended."""


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


def worker_pipes(parent: int) -> tuple[BinaryIO, BinaryIO]:
    """Return (requests, replies), out of reach of the user's code. A worker calls this first of all.

    What user code prints goes to stderr, and it reads nothing. The worker dies with process `parent`,
    even where that is killed -9 while the user's code hangs. Where memory runs out Linux kills it
    first, and not the trainer, which holds more.
    """
    die_with_parent(parent)
    # SLURM may signal every process of a job, so that the ranks save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, replies


def describe(error: BaseException) -> str:
    """Describe an error of user code in one line of bounded length, which can be printed anywhere."""
    try:
        text = " ".join(str(error).split())[:500]
    except Exception as inner:  # user code, too
        text = f"its str() raises {type(inner).__name__}"
    # An unpaired surrogate cannot be written to a file or to stdout.
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()
