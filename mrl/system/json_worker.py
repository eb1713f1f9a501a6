"""Sends requests to a worker process (worker_process.py), one at a time.

The worker answers each request with one line that contains the request's number.
"""

from __future__ import annotations

import threading
from typing import Any

from mrl.system.worker_connection import FORK_RETURNED, NUMBER
from mrl.system.worker_process import (
    START_TIMEOUT_S,
    BadReply,
    WorkerLost,
    WorkerProcess,
    answer_to,
)
from mrl.system.worker_user import WorkerUser


class JsonWorker:
    """Runs user code in a child process, `python -m MODULE SPEC PARENT_PID ARGUMENTS...`.

    If `user` is given, the process runs as that user (worker_guard.py). Start and call a worker on a
    thread that lives as long as the run, because the process is killed when the thread that started it
    ends. close() may be called from another thread.
    """

    def __init__(
        self,
        module: str,
        what: str,
        spec: str,
        *arguments: str,
        start_timeout_s: float = START_TIMEOUT_S,
        user: WorkerUser | None = None,
    ) -> None:
        """Prepare the process without starting it.

        `what` names the user's code in messages, such as "reward 'first_char'".
        """
        self._process = WorkerProcess(
            module, what, spec, *arguments, start_timeout_s=start_timeout_s, user=user
        )
        self._number = 0
        """Number of the latest request."""
        self.num_returned_forks = 0
        """Number of answers with FORK_RETURNED, which says that a process forked by the user's code has
        returned from the call as if it were the worker."""
        self._lock = threading.Lock()
        """Held while waiting for an answer."""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """PID of the worker; None if it is not running."""
        return self._process.pid

    def start(self) -> None:
        """Start the process, and wait until the user's code is loaded.

        Raises InputError if the code cannot be loaded, and RunFailed if the process is killed or
        suspended while it loads.
        """
        with self._lock:
            self._process.start()

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request. The process is started first if it is not running.

        Raises WorkerLost if `close` has been called, or if the worker does not answer within
        `timeout_s`, answers with something invalid, or ends. Raises WorkerNotStarted if the worker
        cannot be started again; this is not an InputError, because the user's code could be loaded
        before. The caller counts failures and decides whether the run continues.
        """
        with self._lock:
            if self._closed:
                raise WorkerLost("the run is ending")
            if self._process.pid is None:
                self._process.restart()
            self._number += 1
            self._process.send({NUMBER: self._number, **request})
            try:
                reply = answer_to(self._number, self._process.next_line(timeout_s))
            except TimeoutError:
                too_late = BadReply(f"no answer within {timeout_s:g} s")
                raise self._process.lost(too_late) from None
            except (OSError, EOFError, BadReply) as error:
                raise self._process.lost(error) from None
            self.num_returned_forks += reply.pop(FORK_RETURNED, False) is True
            return reply

    def close(self) -> None:
        """Kill the worker and its child processes; the worker is not started again. May be called
        more than once."""
        self._closed = True
        self._process.close()  # this ends a call that waits in another thread
        with self._lock:
            self._process.clear()
