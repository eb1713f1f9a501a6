"""Starts the monitor of a node, and starts it again if it is lost.

The rank that starts the monitor also watches it. A monitor that is killed, or is stopped for more
than `STOPPED_S` seconds, is replaced. The new monitor does not know the phase durations that the
old one had measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any

from mrl.system.proc import is_stopped
from mrl.system.processes import Closing, children_without_usr1
from mrl.watch.ticks import DONE

ROOT = Path(__file__).parents[2]
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mrl.watch.monitor import main; main()"
)
LOOK_S = 1.0
STOPPED_S = 20.0
"""The seconds for which the monitor may be stopped (by SIGSTOP) before it is replaced. The other
nodes wait longer than this for the monitor's messages."""
MAX_STARTS = 4
ENDS_S, LEFT_S = 5.0, 1.0
"""The seconds that `close` waits for the monitor to end. After a failure, `close` waits ENDS_S and
then kills the monitor. If the rank has finished the run, `close` waits LEFT_S, after which the
monitor may run on until all ranks of the node have finished."""


class RestartedMonitor(Closing):
    """The monitor of this node. A thread of this process starts it again if it is lost."""

    def __init__(self, job: Mapping[str, Any], server: socket | None = None) -> None:
        """Start the monitor, and the thread that watches it.

        `job` is the first line of the monitor's input. `server` is the socket on which rank 0's
        monitor listens; None on other nodes.
        """
        self._job, self._server = json.dumps(job).encode() + b"\n", server
        self._is_over = threading.Event()
        self._starting = threading.Lock()
        self._is_finished = False
        self._process = self._start()
        threading.Thread(target=self._restart, daemon=True).start()

    def finish(self) -> None:
        """Tell the monitor that this rank has finished the run."""
        self._is_finished = True
        self._is_over.set()
        with self._starting:
            _write(self._process, DONE)

    def close(self) -> None:
        """End the monitor. If `finish` was called, the monitor may run on to watch the other ranks."""
        self._is_over.set()
        with self._starting:
            process = self._process
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(LEFT_S if self._is_finished else ENDS_S)
        except subprocess.TimeoutExpired:
            if not self._is_finished:
                process.kill()
                process.wait()

    def _restart(self) -> None:
        """Start the monitor again whenever it is lost, up to MAX_STARTS starts in total.

        This runs in a thread of its own. The monitor dies with the thread that started it, so the
        thread runs until the monitor has ended.
        """
        for num_starts in range(1, MAX_STARTS + 1):
            code = self._wait()
            with self._starting:
                if not code or self._is_over.is_set():
                    return
                again = "hanging ranks are no longer detected; only timeouts of collectives apply"
                if num_starts < MAX_STARTS:
                    again = "starting another one"
                    self._process = self._start()
            text = f"mrl: the watchdog of this node ended with code {code}; {again}"
            print(text, file=sys.stderr, flush=True)

    def _start(self) -> subprocess.Popen[bytes]:
        with children_without_usr1():
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=() if self._server is None else (self._server.fileno(),),
                start_new_session=True,  # Ctrl-C reaches only the trainer
            )
        _write(process, self._job)
        return process

    def _wait(self) -> int:
        """Wait until the monitor has ended, and return its exit code.

        Kills the monitor if it is stopped for more than `STOPPED_S` seconds.
        """
        process, stopped_s = self._process, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(LOOK_S)
            stopped_s = stopped_s + LOOK_S if is_stopped(process.pid) else 0.0
            if stopped_s > STOPPED_S:
                process.kill()


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin
    with suppress(BrokenPipeError, ValueError):  # the monitor has ended, or the pipe was closed
        process.stdin.write(line)
        process.stdin.flush()
