"""Starts the monitor of a node, and starts it again if it is lost.

Monitor and rank watch each other. A monitor that is killed, or stopped for `STOPPED_S`, is replaced;
the phase times that it had learned are lost.
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
from mrl.watch.monitor import DONE

ROOT = Path(__file__).parents[2]
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mrl.watch.monitor import main; main()"
)
LOOK_S = 1.0
STOPPED_S = 20.0
"""How long it may be stopped: less than the other nodes wait for a message from it."""
MAX_STARTS = 4
ENDS_S, LEFT_S = 5.0, 1.0
"""How long the monitor may take to end after a failure, and how long a rank that has finished waits for
it: the monitor runs until all ranks of its node have finished."""


class RestartedMonitor(Closing):
    """The monitor of this node; a thread of this process starts another one if it is lost."""

    def __init__(self, job: Mapping[str, Any], server: socket | None = None) -> None:
        """`job` is the monitor's first line; `server` is the socket of rank 0's monitor."""
        self._job, self._server = json.dumps(job).encode() + b"\n", server
        self._is_over = threading.Event()
        self._starting = threading.Lock()
        self._is_finished = False
        self._process = self._start()
        threading.Thread(target=self._restart, daemon=True).start()

    def finish(self) -> None:
        """Signal that this rank has finished the run."""
        self._is_finished = True
        self._is_over.set()
        with self._starting:
            _write(self._process, DONE)

    def close(self) -> None:
        """End the monitor, unless it still watches other ranks after `finish`."""
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
        """Start the monitor again if it is lost. It dies with the thread that started it, so this
        thread runs until the monitor has ended."""
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
                start_new_session=True,  # Ctrl-C reaches the trainer alone
            )
        _write(process, self._job)
        return process

    def _wait(self) -> int:
        """Return the exit code of the monitor; kill it if it is stopped for `STOPPED_S`."""
        process, stopped_s = self._process, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(LOOK_S)
            stopped_s = stopped_s + LOOK_S if is_stopped(process.pid) else 0.0
            if stopped_s > STOPPED_S:
                process.kill()


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin
    with suppress(BrokenPipeError, ValueError):  # it has ended, or this one has closed it
        process.stdin.write(line)
        process.stdin.flush()
