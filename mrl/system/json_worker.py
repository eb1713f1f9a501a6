"""Runs user code that may hang or die in a child process, which speaks JSON lines over its pipes.

The worker's first line is `{"ready": true}` or `{"input_error": text}`; after that it answers each
request with one line, which has the request's number (worker_connection.py is its side).
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
"""Seconds for importing the user's module."""
LOOK_S = 0.5
"""Seconds between two checks whether a worker that has not answered is alive."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a worker that was killed; above 128 as worker_guard.py passes them on."""
MARK = "MRL_WORKER"
"""The variable that identifies all processes that a worker has started."""
MAX_REPLY_BYTES = 64 << 20
"""Largest answer of a worker, which the trainer holds in its memory."""


class WorkerLost(Exception):
    """The worker gave no answer and is gone, with whatever it held; the message says how."""


class WorkerNotStarted(WorkerLost):
    """It was lost before, and could not be started again."""


class _BadReply(Exception):
    """The worker sent what is no answer; the message says what came."""


class JsonWorker:
    """Runs the user's code `what` in `python -m MODULE SPEC PARENT_PID ARGUMENTS...`, as `user` where
    one is given (worker_guard.py).

    Use it from a thread that lives as long as the run: the worker dies with the thread that started
    it. close() may come from another.
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
        """Start nothing yet. `what` is for messages: "reward 'first_char'"."""
        guard = ["mrl.system.worker_guard", user.name] if user else []
        self._command = [sys.executable, "-m", *guard, module, spec, str(os.getpid()), *arguments]
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._environment = {**os.environ, **(user.environment if user else {}), MARK: self._mark}
        self._what = what
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = bytearray()
        self._number: int | None = None
        """The number of the request that is being answered; None at the start."""
        self.num_returned_forks = 0
        """How many answers reported a process that the user's code forked and that returned from it."""
        self._lock = threading.Lock()
        """The lock that is held while an answer is awaited."""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """None where it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Raises InputError if the user's code cannot be loaded, and RunFailed if the process was
        killed meanwhile."""
        with self._lock:
            self._start()

    def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer; start the process where it is not running.

        Raises WorkerLost, or WorkerNotStarted: what was loaded once is no bad input, and whoever counts
        failures decides whether the run continues.
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
        """Kill the worker and whatever it started; none is started again. Harmless when repeated."""
        self._closed = True
        self._kill()  # a call that waits in another thread ends
        with self._lock:
            self._clear()

    def _start(self) -> None:
        with children_without_usr1():
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the trainer alone; killpg reaches all of it
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
            raise InputError(f"{self._what}: at its start {error}") from None
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
        """Kill the whole group before anything waits for the process, which would free its number."""
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
        kill_by_variable(MARK, self._mark)  # processes that have left its group
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _end(self) -> int | None:
        """Wait for a process that ends, and clear it away; return its exit code."""
        process = self._process
        assert process
        # The pipe closes a moment before the process is gone; it stays a zombie, its number taken,
        # until what it started is killed too.
        deadline = time.monotonic() + 1.0
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._clear()
        return process.returncode

    def _has_ended(self) -> bool:
        """Whether the worker has ended; it is not reaped, so that its process number is not reused."""
        assert self._process
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is not None

    def _exchange(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a line and await a line. Raises TimeoutError, EOFError, OSError, _BadReply."""
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        out, into = self._process.stdin.fileno(), self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        unsent = memoryview(request)
        has_line = b"\n" in self._unread
        while not has_line:
            poll = select.poll()  # not select(): a trainer may hold more than 1,024 files
            poll.register(into, select.POLLIN)
            if unsent:
                poll.register(out, select.POLLOUT)
            left_s = deadline - time.monotonic()
            has_ended = self._has_ended()
            wait_s = 0.0 if has_ended else min(max(left_s, 0.0), LOOK_S)
            ready = dict(poll.poll(wait_s * 1000))
            if has_ended and into not in ready:
                raise EOFError  # processes that it started may hold the pipe open
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
                        f"an answer of more than {MAX_REPLY_BYTES >> 20} MiB came, which is the "
                        "largest that is read; let the code return less"
                    )
        line, _, self._unread = self._unread.partition(b"\n")
        reply = _decoded(bytes(line), self._number)
        self.num_returned_forks += reply.pop(FORK_RETURNED, False) is True
        return reply


def _decoded(line: bytes, number: int | None) -> dict[str, Any]:
    """Return the answer to a request. Raises _BadReply if the line is not a JSON object, or does not
    have the request's number."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise _BadReply(f"the answer {line[:80]!r} came, expected a JSON object")
    if reply.pop(NUMBER, None) != number:
        raise _BadReply(
            f"received the line {line[:80]!r}, which is not an answer to the request: something else "
            "wrote into the worker's pipe"
        )
    return reply
