"""The server as a child process: starts it, tells whether it is alive, and removes what it leaves."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from mrl import version
from mrl.engines.base import PORT_CLASH
from mrl.engines.sglang.cause import cause
from mrl.engines.sglang.leftovers import kill_session, session_processes, shared_memory_files
from mrl.system.proc import is_stopped
from mrl.system.processes import children_without_usr1, deferring_interrupts
from mrl.system.scratch import Scratch, sweep

LOG_TAIL_LINES = 30
TERM_GRACE_S, KILL_GRACE_S = 0.2, 1.0
"""Seconds to wait after SIGTERM, and after SIGKILL. The first wait is short because a longer one would
not help: SGLang checks for SIGTERM only every 5 s, and would then only finish open requests, of which
there are none at stop()."""
COMM_LEN = 15
"""Length to which Linux truncates a process name. For a process that has died, only this truncated name
can still be read, not the command line."""
PART_PREFIX = "sglang::"
"""The prefix of the process names of the schedulers and the detokenizer."""
LOOK_S, MAX_LOOK_S = 0.5, 2.0
"""Seconds between two checks for stopped processes, and the most seconds that one check adds to the
total of a stopped process. If more time has passed since the previous check, as when the trainer was
stopped too, the state in between is unknown."""
TORCHRUN_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} | {
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
"""Variables of the trainer that the server does not get. With them SGLang would take itself for one of
the trainer's ranks."""

DEVICE_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}
"""More variables that the server does not get. torch_memory_saver, which puts the engine to sleep,
raises RuntimeError under `expandable_segments:True` (torch_memory_saver/entrypoint.py, _sanity_checks).
CUDA_DEVICE_MAX_CONNECTIONS=1 suits Megatron's tensor parallelism, but would serialise all streams of an
engine."""


HIGHEST_PORT = 65_535 - 10_000
"""The highest port for the server. SGLang 0.5.12 uses the port 10,000 above it for gRPC, and does
not start if that port exceeds 65,535 (server_args.py, _handle_deprecated_args). One in five of the
ports that Linux gives by default (32768 to 60999) is higher."""
PORT_TRIES = 64
SOCKET_NAME = "tmp12345678"
"""A name as `tempfile` makes them, which SGLang gives to its sockets."""
PORT_IN_USE = "already in use"
"""Part of the system's error message for a port that is taken. SGLang's own message under DP attention
contains it, too."""


class ServerProcess:
    """A server process (`python -m mrl.engines.sglang.child`) and all its descendants, in a POSIX
    session of their own."""

    def __init__(
        self, server_args: Mapping[str, Any], environment: Mapping[str, str], log_path: Path
    ) -> None:
        """`server_args` are fields of SGLang's ServerArgs, without `host` and `port`. `environment` has
        the variables that are set for the server in addition to the trainer's."""
        self.server_args = dict(server_args)
        self.environment = dict(environment)
        self.log_path = log_path
        self.port = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._scratch: Scratch | None = None
        self._log_start = 0
        self._shared_memory: set[Path] = set()
        self._parts: dict[int, psutil.Process] = {}
        self._looking, self._looked = threading.Lock(), time.monotonic()
        self._halted_s: dict[psutil.Process, float] = {}
        """Seconds for which each stopped process has been stopped, as far as the checks have seen."""

    def start(self) -> None:
        """Start the server on a free loopback port, without waiting until it is ready."""
        self.port = _free_port()
        self._parts, self._halted_s = {}, {}
        sweep()  # folders of engines that were killed with their trainers
        self._scratch = scratch = Scratch("sglang", SOCKET_NAME)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log, children_without_usr1():
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "mrl.engines.sglang.child"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._child_environment(scratch.path),
                start_new_session=True,
                pass_fds=(scratch.descriptor,),
            )
        atexit.register(self.stop)
        settings = {
            "server_args": {**self.server_args, "host": "127.0.0.1", "port": self.port},
            "parent_pid": os.getpid(),
            "scratch": str(scratch.path),
        }
        assert self._popen.stdin is not None
        # The pipe breaks if the server dies at once. The caller then finds the reason in the log.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(settings).encode())
            self._popen.stdin.close()

    def exit_code(self) -> int | None:
        """Return the exit code, or minus the number of the signal that killed the server; None while it
        runs."""
        popen = self._popen  # read once, because a stop() in another thread sets it to None
        return popen.poll() if popen else None

    @property
    def pid(self) -> int | None:
        popen = self._popen
        return popen.pid if popen else None

    def note_parts(self) -> None:
        """Find the schedulers and the detokenizer by their names, and record them, because the server
        needs each.

        A scheduler or detokenizer that has already died is recorded too, unless SGLang has noticed its
        death. A child that one of these processes forks to run another program is not recorded,
        although it has its parent's name until it runs that program.
        """
        found: list[psutil.Process] = []
        if (popen := self._popen) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found = psutil.Process(popen.pid).children(recursive=True)
        parts: dict[int, psutil.Process] = {}
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                name, parent = process.name(), process.parent()
                is_fork = parent is None or parent.name()[:COMM_LEN] == name[:COMM_LEN]
                if name.startswith(PART_PREFIX) and not is_fork:
                    parts[process.pid] = process
        self._parts = parts

    def dead_part(self) -> str | None:
        """Return which recorded process has ended; None if all of them run. SGLang itself takes 5 to 15
        seconds to notice this."""
        for pid, part in self._parts.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if part.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"process {pid}"
        return None

    def halted_part(self, limit_s: float) -> str | None:
        """Return which process has been stopped (SIGSTOP, a debugger) for more than `limit_s`; None if
        no process has. The server may still answer, as its scheduler does while the detokenizer is
        stopped."""
        with self._looking:
            now = time.monotonic()
            if now - self._looked >= LOOK_S:
                seconds, self._looked = min(now - self._looked, MAX_LOOK_S), now
                before = self._halted_s
                self._halted_s = {p: before.get(p, 0.0) + seconds for p in self._halted()}
            over = [process for process, halted_s in self._halted_s.items() if halted_s > limit_s]
        for process in over:
            with contextlib.suppress(psutil.Error):
                return f"process {process.pid} ({process.name()})"
        return None

    def _halted(self) -> list[psutil.Process]:
        found = list(self._parts.values())
        with contextlib.suppress(psutil.Error):
            found += [psutil.Process(self.pid)] if self.pid is not None else []
        return [process for process in found if is_stopped(process.pid)]

    def tree(self) -> list[psutil.Process]:
        """Return the running processes of the server's session, which are the server and its
        descendants."""
        popen = self._popen
        return session_processes(popen.pid) if popen else []

    def note_shared_memory(self) -> None:
        """Record the shared memory files to unlink at stop(). A process that has died no longer tells
        which files it had."""
        self._shared_memory |= shared_memory_files(self.tree())
        if self._scratch is not None:
            self._scratch.note(self._shared_memory)

    def log_text(self) -> str:
        """Return what the server has logged since this start."""
        if not self.log_path.exists():
            return ""
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def log_tail(self) -> str:
        """Return the path and the last lines of the log, as a note for an exception."""
        lines = self.log_text().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"last lines of {self.log_path}:", *lines])

    def why(self) -> str:
        """Return the end of an error message: what went wrong, if the log or the exit code tells,
        and then the path of the log."""
        found = cause(self.log_text(), self.exit_code())
        return f"{found}; its log is {self.log_path}" if found else f"its log is {self.log_path}"

    def has_port_clash(self) -> bool:
        """Return whether this start failed because another program uses a port that it needs."""
        return PORT_IN_USE in self.log_text().lower()

    def ending(self, code: int) -> str:
        """Return the exit code `code` and the reason for it in one line, for error messages."""
        clash = f" ({PORT_CLASH})" if self.has_port_clash() else ""
        return f"exit code {code}{clash}: {self.why()}"

    def kill(self) -> None:
        """Kill the server and its descendants. Their files stay until stop()."""
        popen = self._popen
        if popen is not None:
            kill_session(popen.pid)

    def stop(self) -> None:
        """Send SIGTERM to the server and then SIGKILL to the rest of its session, and remove the
        session's files. A second call does nothing."""
        popen = self._popen
        if popen is None:
            return
        with deferring_interrupts():
            self._stop(popen)

    def _stop(self, popen: subprocess.Popen[bytes]) -> None:
        atexit.unregister(self.stop)
        self.note_shared_memory()
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(TERM_GRACE_S)
        # The session's id cannot be reused while one of its processes exists.
        kill_session(popen.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(KILL_GRACE_S)
        self._popen = None
        self._parts = {}
        for file in self._shared_memory:
            file.unlink(missing_ok=True)
        self._shared_memory = set()
        if self._scratch is not None:
            self._scratch.remove()

    def _child_environment(self, folder: Path) -> dict[str, str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in TORCHRUN_VARIABLES | DEVICE_VARIABLES
            and not name.startswith("TORCHELASTIC_")
        }
        paths = [self.environment.get("PYTHONPATH", ""), str(Path(version.__file__).parents[1])]
        paths.append(environment.get("PYTHONPATH", ""))
        environment.update(self.environment)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        address = self.server_args.get("dist_init_addr")
        if address is None:
            # Use a file, because SGLang's TCP store would listen on every interface.
            store = f"file://{folder}/store"
            environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = store
        if address is None or is_loopback(address.rpartition(":")[0]):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment["TMPDIR"] = str(folder)  # its sockets are deleted with the folder
        return environment


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "[::1]"


def _free_port() -> int:
    """Return a free loopback port up to HIGHEST_PORT. Raises OSError if the system gives none."""
    with contextlib.ExitStack() as held:  # ports that are held are not given again
        for _ in range(PORT_TRIES):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port <= HIGHEST_PORT:
                return port
    raise OSError(
        f"{PORT_TRIES} free ports were all above {HIGHEST_PORT}, which SGLang cannot use; let "
        "net.ipv4.ip_local_port_range begin lower"
    )
