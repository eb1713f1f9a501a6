"""A child process that runs user code, which may hang or die, and exchanges lines of JSON with this
process over pipes.

The worker's first line is `{"ready": true}` or `{"input_error": text}`. worker_connection.py is the
worker's side. json_worker.py sends one request at a time.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

from mrl.errors import InputError, RunFailed
from mrl.system.proc import is_stopped
from mrl.system.process_search import find_by_variable, kill_by_variable
from mrl.system.processes import children_without_usr1
from mrl.system.worker_connection import NUMBER
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


class BadReply(Exception):
    """The worker sent something that is not a valid answer. The message says what."""


class WorkerProcess:
    """The process `python -m MODULE SPEC PARENT_PID ARGUMENTS...`, which can be started repeatedly.

    If `user` is given, the process runs as that user (worker_guard.py). The process is killed when the
    thread that started it ends. `close` may be called from any thread; all other methods are for one
    thread at a time.
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
        self.mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        """The value of MARK in the environment of the worker's processes."""
        self._environment = {**os.environ, **(user.environment if user else {}), MARK: self.mark}
        self._what = what
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent: deque[memoryview] = deque()
        self._unread = bytearray()
        self._lines: deque[bytes] = deque()
        self._bad: BadReply | None = None
        """What is wrong with what came after the last of `_lines`."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """PID of the worker; None if it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, and wait until the user's code is loaded.

        Raises InputError if the code cannot be loaded, and RunFailed if the process is killed or
        suspended while it loads.
        """
        with children_without_usr1():
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C does not reach it; killpg reaches its group
            )
        if self._is_closed:
            self._kill()
        assert self._process.stdin
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            reply = answer_to(None, self.next_line(self._start_timeout_s))
        except TimeoutError:
            halted = any(map(is_stopped, find_by_variable(MARK, self.mark)))
            self.clear()
            if halted:
                raise RunFailed(
                    f"{self._what}: its worker was stopped (SIGSTOP) while it imported; start again"
                ) from None
            raise InputError(
                f"{self._what}: its import took more than {self._start_timeout_s:g} s"
            ) from None
        except BadReply as error:
            self.clear()
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
            self.clear()
            raise InputError(reply["input_error"])

    def restart(self) -> None:
        """Start the process after it was lost. Raises WorkerNotStarted if this is not possible; that is
        no InputError, because the user's code could be loaded before."""
        try:
            self.start()
        except (InputError, RunFailed, OSError) as error:
            raise WorkerNotStarted(f"could not be started again: {error}") from None

    def send(self, message: dict[str, Any]) -> None:
        """Add a message to those that `receive` sends."""
        self._unsent.append(memoryview(json.dumps(message).encode() + b"\n"))

    def next_line(self, timeout_s: float) -> bytes:
        """Send what is unsent, and return the next line.

        Raises TimeoutError if none comes in time, EOFError or OSError if the worker has ended, and
        BadReply if the line is too long.
        """
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            left_s = deadline - time.monotonic()
            self._exchange(max(left_s, 0.0))
            if not self._lines and left_s <= 0:
                raise TimeoutError
        return self._lines.popleft()

    def receive(self, timeout_s: float, wake: int) -> list[bytes]:
        """Return the lines that have come, maybe none. Wait for them at most `timeout_s` seconds, and
        only until the file descriptor `wake` is readable. Meanwhile send what is unsent. Raises
        EOFError, OSError and BadReply as `next_line` does."""
        if not self._lines:
            self._exchange(timeout_s, wake)
        lines, self._lines = list(self._lines), deque()
        return lines

    def lost(self, error: Exception) -> WorkerLost:
        """Remove what is left of a process, and return why it was lost. `error` is a BadReply that says
        why it has to be killed, or the EOFError or OSError of a process that has ended."""
        if isinstance(error, BadReply):
            self.clear()
            return WorkerLost(f"{error}, killed")
        return WorkerLost(f"worker process (exit code {self._end()})")

    def close(self) -> None:
        """Kill the worker and its process group. A worker that is being started is killed, too."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        """Kill the worker's process group, unless the worker has been reaped already.

        After a worker has been reaped, the system may have reused its PID for another process.
        """
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def clear(self) -> None:
        """Kill all processes that the worker has started, and forget what was not sent or read."""
        self._kill()
        process, self._process = self._process, None
        self._unsent, self._unread, self._lines, self._bad = deque(), bytearray(), deque(), None
        if process is None:
            return
        process.wait()
        kill_by_variable(MARK, self.mark)  # its descendants that have left the process group
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
        self.clear()
        return process.returncode

    def _has_ended(self) -> bool:
        """Return whether the worker has exited, without reaping it, so that its PID is not reused."""
        assert self._process
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is not None

    def _exchange(self, timeout_s: float, wake: int | None = None) -> None:
        """Wait until something can be sent or read, at most LOOK_S, and send and read it. Lines that
        came before an error are read before it is raised."""
        if self._bad is not None:
            raise self._bad
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        out, into = self._process.stdin.fileno(), self._process.stdout.fileno()
        poll = select.poll()  # select() fails above 1,024 open files
        poll.register(into, select.POLLIN)
        if self._unsent:
            poll.register(out, select.POLLOUT)
        if wake is not None:
            poll.register(wake, select.POLLIN)
        has_ended = self._has_ended()
        ready = dict(poll.poll(0.0 if has_ended else min(timeout_s, LOOK_S) * 1000))
        if has_ended and into not in ready:
            raise EOFError  # its children may keep the pipe open
        if into in ready:
            self._read(into)
        if out in ready:
            try:
                self._write(out)
            except OSError:
                if into not in ready:
                    raise

    def _write(self, out: int) -> None:
        sent = os.write(out, self._unsent[0][:65536])
        rest = self._unsent[0][sent:]
        if rest:
            self._unsent[0] = rest
        else:
            self._unsent.popleft()

    def _read(self, into: int) -> None:
        chunk = os.read(into, 1 << 20)
        if not chunk:
            raise EOFError
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._lines.append(bytes(self._unread + end))
            self._unread = bytearray()
        self._unread += rest
        if len(self._unread) > MAX_REPLY_BYTES:
            self._bad = BadReply(
                f"the answer has more than {MAX_REPLY_BYTES >> 20} MiB, which is the "
                "maximum; let the code return less"
            )


def decoded(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line. Raises BadReply if there is none."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise BadReply(f"got the answer {line[:80]!r}, expected a JSON object")
    return reply


def answer_to(number: int | None, line: bytes) -> dict[str, Any]:
    """Return the answer in a line, without the number of the request.

    Raises BadReply if the line is not a JSON object, or does not have the request's `number`.
    """
    reply = decoded(line)
    if reply.pop(NUMBER, None) != number:
        raise unexpected(line)
    return reply


def unexpected(line: bytes) -> BadReply:
    """Return the error of a line that answers no request."""
    return BadReply(
        f"received the line {line[:80]!r}, which is not an answer to the request: something else "
        "wrote into the worker's pipe"
    )
