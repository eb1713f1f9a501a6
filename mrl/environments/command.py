"""Runs an agent: a program of the user that talks to the policy over HTTP and prints a reward.

The program gets one JSON object on its standard input, and its last line of output is the reward. Its
process group is killed when the episode is over, whatever the reason.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from mrl.config import EnvironmentConfig
from mrl.errors import InputError, RunFailed
from mrl.system.process_search import kill_by_variable
from mrl.system.processes import Closing, children_without_usr1

MARK, EPISODE = "MRL_AGENTS", "MRL_EPISODE"
"""Environment variables that identify all processes of a run's agents, and those of one episode."""
MAX_OUTPUT_BYTES = 64 << 20
"""Bytes that an agent may print, stdout and stderr together. One that prints more is killed."""
KEPT_BYTES = 64 << 10
"""Number of bytes that are kept from the end of each of the two outputs."""
LOOK_S = 0.2
"""Seconds between two checks of the time limit and of the end of the process."""
DRAIN_S = 1.0
"""Maximum number of seconds for reading what is left in the pipes of an agent that has exited."""
MAX_REWARD = 3.4e38
"""The largest reward that float32 holds."""


@dataclass(frozen=True)
class Outcome:
    """How an agent's process ended."""

    reward: float | None
    """The reward that it printed; None if it failed."""
    error: str = ""
    """Why there is no reward, in one line; empty if there is one."""
    answer: str | None = None
    """The text that the recipe's reward judges; `reward` is then only a placeholder. None if the
    episode has its reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged beside the reward."""


class AgentCommand(Closing):
    """Runs the program of `environment.command`, once per episode. Thread-safe.

    Raises InputError if there is no such program.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._command = resolved(config.command)
        self._limit_s = config.episode_limit_s
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._closed = threading.Event()
        self._guard = Guard(self._mark)

    def run(
        self,
        given: Mapping[str, Any],
        variables: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
        stop: threading.Event | None = None,
    ) -> Outcome:
        """Run one episode, and return when its processes are gone.

        The program reads `given` as JSON from its standard input, and has the environment variables
        `variables`. It is killed when it has taken `environment.episode_limit_s` by the clock `now`,
        or when `stop` is set.
        """
        end = now() + self._limit_s
        episode, row = secrets.token_hex(8), json.dumps(given).encode()
        environment = {**os.environ, **variables, MARK: self._mark, EPISODE: episode}
        try:
            with children_without_usr1():
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            return Outcome(None, f"it cannot be started: {error.strerror}")
        with ExitStack() as undo:
            undo.callback(_end, process)
            try:
                streams = _Streams(process, row)
            except OSError as error:
                return Outcome(None, f"it cannot be watched: {error.strerror}")
            undo.callback(streams.close)
            why = self._watch(process, streams, lambda: end - now(), stop or self._closed)
        if why:
            kill_by_variable(EPISODE, episode)  # also those that left the process group
            return Outcome(None, why)
        return _outcome(process.returncode, streams)

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        streams: _Streams,
        left_s: Callable[[], float],
        stop: threading.Event,
    ) -> str:
        """Feed and read a process until it has exited; return why it must be killed, or nothing."""
        while not _has_exited(process):
            if stop.is_set() or self._closed.is_set():
                return "the rollout is over"
            if left_s() <= 0:
                return f"no end within environment.episode_limit_s={self._limit_s:g} s, killed"
            streams.exchange(min(LOOK_S, max(left_s(), 0.0)))
            if streams.num_read > MAX_OUTPUT_BYTES:
                return (
                    f"it printed more than {MAX_OUTPUT_BYTES >> 20} MiB, killed; let it print less"
                )
        end = time.monotonic() + DRAIN_S
        while streams.exchange(0.0) and time.monotonic() < end:
            pass
        return ""

    def sweep(self) -> None:
        """Kill what is left of all episodes. No episode may be running."""
        kill_by_variable(MARK, self._mark)

    def close(self) -> None:
        """Kill all agents. May be called more than once."""
        self._closed.set()
        self._guard.close()


def resolved(command: Sequence[str], key: str = "environment.command") -> list[str]:
    """Return the command with the path of its program. Raises InputError if there is none, or if it
    is `python` and its script does not exist; `key` is the recipe's key in the message."""
    program, *arguments = command
    if program == "python":
        script = arguments[0] if arguments else ""
        if script.endswith(".py") and not os.path.isfile(script):
            raise InputError(
                f"{key}: there is no file {script} in {os.getcwd()}, nor beside the "
                "recipe; give its path"
            )
        return [sys.executable, *arguments]
    if (found := shutil.which(program)) is None:
        if not arguments and len(words := program.split()) > 1:
            raise InputError(
                f"{key}: got the text {program!r}, expected a list of words: [{', '.join(words)}]"
            )
        raise InputError(
            f"{key}: there is no program {program!r} in PATH or at this path from "
            f"{os.getcwd()}; give the name or path of a program that this user may run"
        )
    return [found, *arguments]


def printed_reward(output: str) -> float:
    """Return the reward in the last line of a program's output: a number, or a JSON object with the
    number `reward`. Raises ValueError, which says what was found instead."""
    line = _last_line(output)
    shown = f"the last line of its output is {line[:200]!r}"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        found = found.get("reward")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f'{shown}, expected a reward: a number, or {{"reward": NUMBER}}')
    if not math.isfinite(found) or abs(found) > MAX_REWARD:
        raise ValueError(f"{shown}, expected a finite number")
    return float(found)


def _last_line(output: str) -> str:
    """Return the last line that is not blank. `str.splitlines` would also split at characters such as
    U+2028, which a line of JSON may contain."""
    lines = re.split("[\r\n]+", output)
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _outcome(code: int, streams: _Streams) -> Outcome:
    if code:
        last = _last_line(streams.stderr)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        said = f": {' '.join(last.split())[:500]}" if last else " and wrote nothing to stderr"
        return Outcome(None, f"it {how}{said}")
    try:
        return Outcome(printed_reward(streams.stdout))
    except (ValueError, OverflowError) as error:
        return Outcome(None, str(error))


class _Streams:
    """The pipes of a process. No pipe ever blocks, and only the end of the output is kept."""

    def __init__(self, process: subprocess.Popen[bytes], given: bytes) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self._pipes = (process.stdin, process.stdout, process.stderr)
        self._into, self._out, self._err = (pipe.fileno() for pipe in self._pipes)
        self._tails: dict[int, deque[bytes]] = {self._out: deque(), self._err: deque()}
        self._sizes = dict.fromkeys(self._tails, 0)
        self._unsent = memoryview(given)
        self._open = {self._into, self._out, self._err}
        self._end = os.pidfd_open(process.pid)
        """Becomes readable when the process exits."""
        self.num_read = 0
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    @property
    def stdout(self) -> str:
        return b"".join(self._tails[self._out]).decode(errors="replace")

    @property
    def stderr(self) -> str:
        return b"".join(self._tails[self._err]).decode(errors="replace")

    def exchange(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds until something can be sent or read or the process exits, and
        send and read what is possible. Return whether anything was sent or read."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        for descriptor in self._open:
            poll.register(descriptor, select.POLLOUT if descriptor == self._into else select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)} & self._open
        for descriptor in ready:
            if not (self._send() if descriptor == self._into else self._read(descriptor)):
                self._open.discard(descriptor)
        return bool(ready)

    def _send(self) -> bool:
        """Send the next bytes; return whether more are left."""
        try:
            self._unsent = self._unsent[os.write(self._into, self._unsent[:65536]) :]
        except BlockingIOError:
            return True
        except OSError:  # the program does not read its input, which is fine
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._pipes[0].close()
        return bool(self._unsent)

    def _read(self, descriptor: int) -> bool:
        """Read the next bytes; return whether the pipe is still open."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.num_read += len(chunk)
        tail = self._tails[descriptor]
        tail.append(chunk)
        self._sizes[descriptor] += len(chunk)
        while self._sizes[descriptor] - len(tail[0]) >= KEPT_BYTES:
            self._sizes[descriptor] -= len(tail.popleft())
        return bool(chunk)

    def close(self) -> None:
        os.close(self._end)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, close the pipes and reap the process."""
    with suppress(ProcessLookupError):  # not reaped yet, so the number is still its own
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe
        with suppress(OSError):
            pipe.close()
    process.wait()


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process has exited, without reaping it, so that its number is not reused."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, look) is not None


class Guard(Closing):
    """A process that kills the agents when this process ends, however it ends: it waits for the end
    of a pipe that only this process holds open."""

    def __init__(self, mark: str) -> None:
        with children_without_usr1():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mrl.system.process_search", MARK, mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdout
        if self._process.stdout.readline() != b"ready\n":
            raise RunFailed("the process that ends agents with the run could not be started")

    def close(self) -> None:
        """Let the guard kill the agents, and wait until it has."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
