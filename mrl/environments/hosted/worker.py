"""One worker process that plays many episodes at a time, and what it says.

programs/episode_loop.py has the messages.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mrl.environments.command import EPISODE, KEPT_BYTES, MARK
from mrl.errors import InputError, RunFailed
from mrl.system.process_search import kill_by_variable
from mrl.system.processes import children_without_usr1

START_S = 300.0
"""Seconds for a worker to import and load its environment."""
PING_S = 2.0
"""Seconds between two questions whether the worker still answers."""
MAX_LINE_BYTES = 64 << 20


@dataclass(eq=False)
class Pending:
    """An episode that a worker plays."""

    ended: threading.Event = field(default_factory=threading.Event)
    reply: dict[str, Any] = field(default_factory=dict)
    is_cancelled: bool = False

    def end(self, reply: dict[str, Any]) -> None:
        self.reply = reply
        self.ended.set()


class HostedWorker:
    """A worker from its start to its end; it is not started again. Thread-safe.

    Raises InputError if the environment cannot be loaded, and RunFailed if the worker is killed or
    takes longer than START_S.
    """

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        spec: Mapping[str, Any],
        variables: Mapping[str, str],
        mark: str,
        answer_limit_s: float,
    ) -> None:
        """`what` names the environment in messages. The worker is killed if its event loop does not
        answer for `answer_limit_s` seconds. Its processes have the environment variable MARK with the
        value `mark`."""
        self._what, self._answer_limit_s = what, answer_limit_s
        self._token = secrets.token_hex(8)
        self._environment = {**os.environ, **variables, MARK: mark, EPISODE: self._token}
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._num_asked = 0
        self._why_lost = ""
        self._heard_at = time.monotonic()
        self._last_said: deque[bytes] = deque()
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._started = threading.Event()
        self._input_error = ""
        self._is_ready = False
        try:
            with children_without_usr1():
                self._process = subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            raise InputError(f"{what}: {command[0]} cannot be started: {error.strerror}") from None
        self._send(spec)
        threads = (self._write, self._read, self._read_errors, self._ask)
        self._threads = [threading.Thread(target=each, daemon=True) for each in threads]
        for thread in self._threads:
            thread.start()
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        self._started.wait(START_S)
        if self._is_ready:
            return
        is_late = not self._started.is_set()
        self.kill("")
        if self._input_error:
            raise InputError(f"{self._what}: {self._input_error}")
        if is_late:
            raise RunFailed(f"{self._what}: its worker was not ready within {START_S:g} s")
        raise RunFailed(f"{self._what}: {self._why_lost or 'its worker ended while it started'}")

    @property
    def num_playing(self) -> int:
        with self._lock:
            return len(self._pending)

    @property
    def is_lost(self) -> bool:
        with self._lock:
            return bool(self._why_lost)

    def play(self, request: Mapping[str, Any]) -> tuple[int, Pending]:
        """Begin an episode. Return its number, and what will have the reply."""
        pending = Pending()
        with self._lock:
            number, self._num_asked = self._num_asked, self._num_asked + 1
            if self._why_lost:
                pending.end({"error": self._why_lost})
            else:
                self._pending[number] = pending
        self._send({"play": number, **request})
        return number, pending

    def cancel(self, number: int) -> None:
        """Ask the worker to end an episode. Its reply comes later."""
        with self._lock:
            if (pending := self._pending.get(number)) is not None:
                pending.is_cancelled = True
        self._send({"cancel": number})

    def has_left_overs(self) -> bool:
        """Return whether episodes are still running although they were cancelled."""
        with self._lock:
            return any(each.is_cancelled for each in self._pending.values())

    def kill(self, why: str) -> None:
        """Kill the worker and all that it started. Episodes that it plays end with the error `why`."""
        with self._lock:
            self._why_lost = self._why_lost or why or "the run is ending"
            pending, self._pending = list(self._pending.values()), {}
        for each in pending:
            each.end({"error": self._why_lost})
        self._unsent.put(None)
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        kill_by_variable(EPISODE, self._token)
        self._started.set()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._unsent.put(json.dumps(message).encode() + b"\n")

    def _write(self) -> None:
        assert self._process.stdin
        with suppress(OSError, ValueError), self._process.stdin as pipe:
            while (line := self._unsent.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout
        why = ""
        with self._process.stdout as pipe:
            while line := pipe.readline(MAX_LINE_BYTES + 1):
                try:
                    self._handle(json.loads(line))
                except (ValueError, TypeError, KeyError, AttributeError):
                    why = f"its worker wrote {line[:80]!r}, expected a message"
                    break
        self.kill(why or self._how_it_ended())

    def _handle(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._heard_at = time.monotonic()
        if "done" in message:
            with self._lock:
                pending = self._pending.pop(message["done"], None)
            if pending is not None:
                pending.end(message)
        elif "pong" not in message:
            self._input_error = message.get("input_error", "")
            self._is_ready = message.get("ready", False)
            self._started.set()

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        how = "closed its output" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        self._threads[2].join(1.0)
        text = b"".join(self._last_said).decode(errors="replace").strip()
        last = " ".join(text.splitlines()[-1].split())[:500] if text else ""
        return f"its worker {how}{': ' if last else ''}{last}"

    def _read_errors(self) -> None:
        assert self._process.stderr
        size = 0
        with self._process.stderr as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self._last_said.append(chunk)
                size += len(chunk)
                while size - len(self._last_said[0]) >= KEPT_BYTES:
                    size -= len(self._last_said.popleft())

    def _ask(self) -> None:
        """Ask the worker again and again whether it answers, and kill it if it does not."""
        self._started.wait()
        number = 0
        while not self.is_lost:
            number += 1
            asked_at = time.monotonic()
            self._send({"ping": number})
            while not self.is_lost and self._heard_at < asked_at:
                if time.monotonic() - asked_at > self._answer_limit_s:
                    self.kill(
                        f"its worker did not answer within environment.time_limit_s="
                        f"{self._answer_limit_s:g} s, killed with all its episodes: code that waits "
                        "without await stops all episodes of a worker"
                    )
                time.sleep(0.1)
            end = asked_at + PING_S
            while not self.is_lost and time.monotonic() < end:
                time.sleep(0.1)
