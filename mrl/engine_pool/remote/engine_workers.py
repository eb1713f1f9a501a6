"""Runs the workers of one engine, one after the other, each in a process of its own."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mrl.config import RolloutConfig
from mrl.engine_pool.remote.messages import failed_message
from mrl.engine_pool.remote.process import CONNECT_S
from mrl.engine_pool.remote.wire import Wire, WireClosed
from mrl.errors import EngineGone
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.proc import is_stopped
from mrl.system.processes import children_without_usr1

BEAT_S = 1.0
"""Maximum time in seconds between two heartbeats of a supervisor, whatever its worker does."""
EXIT_S = 30.0
"""Seconds that a worker may take to exit after it has closed its pipe."""


@dataclass(frozen=True)
class Job:
    """How a supervisor starts and watches the workers of a run or of a service."""

    module: str
    """The module that `python -m` runs as a worker. The worker reads its settings from stdin as JSON.
    """
    settings: Mapping[str, Any]
    """The worker's settings, apart from those that `supervise` adds."""
    rollout: RolloutConfig
    wait_s: float
    """Seconds that the trainers may take to start."""
    worker_timeout_s: float
    """Seconds without a heartbeat after which a worker is killed. The first heartbeat may take
    `rollout.start_timeout_s` seconds."""


class EngineWorkers:
    """The workers of one engine. Any thread may call `leave` and `kill`."""

    def __init__(
        self,
        job: Job,
        settings: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        keep_alive: Callable[[], None] = beat,
    ) -> None:
        """`settings` are the complete settings of a worker. `environment` has variables that differ
        from those of this process. `keep_alive` is called at least every BEAT_S seconds while a
        worker runs."""
        self.job, self.settings = job, settings
        self._environment = {**os.environ, **(environment or {})}
        self._keep_alive = keep_alive
        self.is_leaving = False
        """Whether the engine is being removed: no further worker may be started."""
        self._lock = threading.Lock()
        self._is_killed = False
        self._process: subprocess.Popen[bytes] | None = None

    def leave(self) -> None:
        """Start no further worker."""
        self.is_leaving = True

    def kill(self) -> None:
        """Kill the worker. Linux ends the processes that it has started."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def run_one(self) -> tuple[int, bool]:
        """Run a worker until it ends. Return its exit code, and whether it has joined the trainer.

        A worker sends its first heartbeat when it has joined the trainer. The worker is killed if its
        heartbeats stop.
        """
        reader, writer = os.pipe()
        with children_without_usr1():
            process = subprocess.Popen(
                [sys.executable, "-m", self.job.module],
                stdin=subprocess.PIPE,
                pass_fds=(writer,),
                env=self._environment,
            )
        os.close(writer)
        with self._lock:
            self._process = process
            if self._is_killed:
                process.kill()
        try:
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(json.dumps({**self.settings, "pulse": writer}).encode())
                process.stdin.close()
            limits = self.job.rollout.start_timeout_s, self.job.worker_timeout_s
            why, has_joined = wait_for_silence(reader, process.pid, *limits, self._keep_alive)
            if not why:
                try:
                    return process.wait(EXIT_S), has_joined
                except subprocess.TimeoutExpired:
                    why = f"did not exit within {EXIT_S:g} s of its end"
            console.warning(f"rollout engine {self.settings['engine']}: its worker {why}")
            process.kill()
            return process.wait(), has_joined  # returns after a kill, unless a device hangs
        finally:
            with self._lock:
                self._process = None
            os.close(reader)

    def report_gone(self, num_failed: int, last: str) -> None:
        """Tell the trainer that `num_failed` workers in a row ended before they joined, and wait until
        it ends the run. `last` says how the last one ended."""
        gone = EngineGone(
            f"{num_failed} workers in a row ended before they joined, more than "
            f"rollout.max_restarts={self.job.rollout.max_restarts}; the last one {last}"
        )
        hello = {key: self.settings[key] for key in ("token", "engine")} | {"type": "hello"}
        wait_for_the_trainer(self.settings, hello, failed_message(gone))


def how_it_ended(code: int) -> str:
    """Describe the exit code of a worker."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def wait_for_silence(
    reader: int,
    pid: int,
    start_s: float,
    later_s: float,
    keep_alive: Callable[[], None] = beat,
) -> tuple[str, bool]:
    """Wait until a worker closes its pipe or its heartbeats stop.

    Returns (why the worker counts as lost, whether it has sent a heartbeat). The reason is empty if the
    worker has closed the pipe. The first heartbeat may take `start_s` seconds, because it follows the
    worker's imports. Each later heartbeat may take `later_s` seconds. A worker that is stopped
    (SIGSTOP) for `later_s` seconds counts as lost, too. Time in which this process itself does not run
    is not counted.
    """
    silent_s, stopped_s, has_joined = 0.0, 0.0, False
    while silent_s < (later_s if has_joined else start_s) and stopped_s < later_s:
        keep_alive()
        wait_s = min(BEAT_S, later_s)
        silent_s += wait_s
        stopped_s = stopped_s + wait_s if is_stopped(pid) else 0.0
        if select.select([reader], [], [], wait_s)[0]:
            if not os.read(reader, 4096):
                return "", has_joined
            silent_s, stopped_s, has_joined = 0.0, 0.0, True
    if stopped_s >= later_s:
        return f"is stopped (SIGSTOP) for {stopped_s:g} s", has_joined
    return f"sent no heartbeat for {silent_s:g} s", has_joined


def wait_for_the_trainer(address: Mapping[str, Any], *messages: Mapping[str, Any]) -> None:
    """Connect to the trainer, send it messages, and wait until it ends the run or its process ends.

    If the trainer's node is lost, this wait does not end by itself; the watchdog then ends this
    rank.
    """
    with suppress(OSError, WireClosed):
        connection = socket.create_connection(tuple(address["server"]), CONNECT_S)
        wire = Wire(connection)
        for message in messages:
            wire.send(message)
        answer: dict[str, Any] = {}
        while answer.get("type") != "stop":
            while not select.select([connection], [], [], BEAT_S)[0]:
                beat()
            answer, _ = wire.receive()
        wire.close()


def answers(address: Sequence[Any]) -> bool:
    """Return whether a server listens at an address (host, port)."""
    with suppress(OSError):
        socket.create_connection((address[0], address[1]), 5.0).close()
        return True
    return False
