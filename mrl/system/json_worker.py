"""Runs user code, which may hang or die, in a child process that speaks JSON lines over pipes.

The worker's first line is `{"ready": true}` or `{"input_error": text}`. The worker answers each
request with one line that contains the request's number. worker_connection.py is the worker's side.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from mrl.errors import InputError, RunFailed
from mrl.system.proc import is_stopped
from mrl.system.process_search import find_by_variable, kill_by_variable
from mrl.system.processes import children_without_usr1
from mrl.system.worker_connection import FORK_RETURNED, NUMBER
from mrl.system.worker_user import WorkerUser

START_TIMEOUT_S = 120.0
"""Time limit in seconds for importing the user's module."""
LOOK_S = 0.5
"""Seconds between two checks that the worker process still runs, while its answer is awaited."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a worker that was killed. The codes above 128 come from worker_guard.py."""
MARK = "MRL_WORKER"
"""Environment variable that identifies all processes that a worker has started."""
MAX_REPLY_BYTES = 64 << 20
"""Maximum size of a worker's answer, which the trainer holds in memory."""


class WorkerLost(Exception):
    """The worker gave no answer, and was killed or has ended. The message says why.

    All state of the worker is lost.
    """


class WorkerNotStarted(WorkerLost):
    """A worker that had been lost in an earlier call could not be started again."""


class _BadReply(Exception):
    """The worker sent something that is not a valid answer. The message says what."""


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
        guard = ["mrl.system.worker_guard", user.name] if user else []
        self._command = [sys.executable, "-m", *guard, module, spec, str(os.getpid()), *arguments]
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._environment = {**os.environ, **(user.environment if user else {}), MARK: self._mark}
        self._what = what
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = bytearray()
        self._number: int | None = None
        """Number of the current request; None during the start."""
        self.num_returned_forks = 0
        """Number of answers with FORK_RETURNED, which says that a process forked by the user's code has
        returned from the call as if it were the worker."""
        self._lock = threading.Lock()
        """Held while waiting for an answer."""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """PID of the worker; None if it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, and wait until the user's code is loaded.

        Raises InputError if the code cannot be loaded, and RunFailed if the process is killed or
        suspended while it loads.
        """
        with self._lock:
            self._start()

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
            if self._process is None:
                self._restart()
            self._number = (self._number or 0) + 1
            numbered = {NUMBER: self._number, **request}
            try:
                return self._exchange(json.dumps(numbered).encode() + b"\n", timeout_s)
            except TimeoutError:
                self._clear()
                raise WorkerLost(f"no answer within {timeout_s:g} s, killed") from None
            except _BadReply as error:
                self._clear()
                raise WorkerLost(f"{error}, killed") from None
            except (OSError, EOFError):
                raise WorkerLost(f"worker process (exit code {self._end()})") from None

    def close(self) -> None:
        """Kill the worker and its child processes; the worker is not started again. May be called
        more than once."""
        self._closed = True
        self._kill()  # this ends a call that waits in another thread
        with self._lock:
            self._clear()

    def _start(self) -> None:
        with children_without_usr1():
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C does not reach it; killpg reaches its group
            )
        if self._closed:
            self._kill()
        self._number = None
        assert self._process.stdin
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            reply = self._exchange(b"", self._start_timeout_s)
        except TimeoutError:
            halted = any(map(is_stopped, find_by_variable(MARK, self._mark)))
            self._clear()
            if halted:
                raise RunFailed(
                    f"{self._what}: its worker was stopped (SIGSTOP) while it imported; start again"
                ) from None
            raise InputError(
                f"{self._what}: its import took more than {self._start_timeout_s:g} s"
            ) from None
        except _BadReply as error:
            self._clear()
            raise InputError(f"{self._what}: during its start {error}") from None
        except (OSError, EOFError):
            code = self._end()
            text = f"{self._what}: its import ended the worker process (exit code {code})"
            if code in KILLED:
                raise RunFailed(
                    f"{text}: the host ran out of memory, or someone killed it"
                ) from None
            raise InputError(text) from None
        if "input_error" in reply:
            self._clear()
            raise InputError(reply["input_error"])

    def _restart(self) -> None:
        try:
            self._start()
        except (InputError, RunFailed, OSError) as error:
            raise WorkerNotStarted(f"could not be started again: {error}") from None

    def _kill(self) -> None:
        """Kill the worker's process group, unless the worker has been reaped already.

        After a worker has been reaped, the system may have reused its PID for another process.
        """
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _clear(self) -> None:
        self._kill()
        process, self._process, self._unread = self._process, None, bytearray()
        if process is None:
            return
        process.wait()
        kill_by_variable(MARK, self._mark)  # its descendants that have left the process group
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _end(self) -> int | None:
        """Wait for a worker that is exiting, clean up after it, and return its exit code."""
        process = self._process
        assert process
        # The pipe closes a moment before the process has exited. The process stays a zombie, so that
        # its PID is not reused until its children have also been killed.
        deadline = time.monotonic() + 1.0
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._clear()
        return process.returncode

    def _has_ended(self) -> bool:
        """Return whether the worker has exited, without reaping it, so that its PID is not reused."""
        assert self._process
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is not None

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a line, wait for the line that answers it, and return the answer.

        Raises TimeoutError if no answer comes in time, EOFError or OSError if the worker has ended, and
        _BadReply if the line is not an answer.
        """
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        out, into = self._process.stdin.fileno(), self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        unsent = memoryview(request)
        has_line = b"\n" in self._unread
        while not has_line:
            poll = select.poll()  # select() fails above 1,024 open files
            poll.register(into, select.POLLIN)
            if unsent:
                poll.register(out, select.POLLOUT)
            left_s = deadline - time.monotonic()
            has_ended = self._has_ended()
            wait_s = 0.0 if has_ended else min(max(left_s, 0.0), LOOK_S)
            ready = dict(poll.poll(wait_s * 1000))
            if has_ended and into not in ready:
                raise EOFError  # its children may keep the pipe open
            if not ready and left_s <= 0:
                raise TimeoutError
            if out in ready:
                unsent = unsent[os.write(out, unsent[:65536]) :]
            if into in ready:
                chunk = os.read(into, 1 << 20)
                if not chunk:
                    raise EOFError
                self._unread += chunk
                has_line = b"\n" in chunk
                if len(self._unread) > MAX_REPLY_BYTES:
                    raise _BadReply(
                        f"the answer has more than {MAX_REPLY_BYTES >> 20} MiB, which is the "
                        "maximum; let the code return less"
                    )
        line, _, self._unread = self._unread.partition(b"\n")
        reply = _decoded(bytes(line), self._number)
        self.num_returned_forks += reply.pop(FORK_RETURNED, False) is True
        return reply


def _decoded(line: bytes, number: int | None) -> dict[str, Any]:
    """Return the answer in a line, without the number of the request.

    Raises _BadReply if the line is not a JSON object, or does not have the request's `number`.
    """
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise _BadReply(f"got the answer {line[:80]!r}, expected a JSON object")
    if reply.pop(NUMBER, None) != number:
        raise _BadReply(
            f"received the line {line[:80]!r}, which is not an answer to the request: something else "
            "wrote into the worker's pipe"
        )
    return reply
