"""The server as a child process: start it, know whether it lives, leave nothing behind."""

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

import mrl
from mrl.rollout.base import PORT_CLASH
from mrl.rollout.sglang.cause import cause
from mrl.rollout.sglang.leftovers import (
    kill_session,
    session_processes,
    shared_memory_files,
)
from mrl.system.proc import is_stopped
from mrl.system.processes import children_without_usr1
from mrl.system.scratch import Scratch, sweep

LOG_TAIL_LINES = 30
TERM_GRACE_S = 1.0
"""SGLang looks at SIGTERM every 5 s; requests are never in flight here, so nothing is to drain."""
COMM_LEN = 15
"""The characters of its name that Linux keeps of a process that has died."""
PART_PREFIX = "sglang::"
"""Schedulers and the detokenizer."""
LOOK_S, MAX_LOOK_S = 0.5, 2.0
"""Seconds between two checks for stopped processes, and the most time that one check adds: while
nothing checked, as when the trainer was stopped too, the state is not known."""
TORCHRUN_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} | {
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
"""The trainer's; SGLang would take itself for one of its ranks."""

DEVICE_VARIABLES = {
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
}
"""The trainer's too. torch_memory_saver, by which the engine sleeps, raises RuntimeError under
`expandable_segments:True` (torch_memory_saver/entrypoint.py, _sanity_checks). One connection suits
Megatron's tensor parallelism and would queue all streams of an engine behind each other."""


HIGHEST_PORT = 65_535 - 10_000
"""SGLang 0.5.12 takes the port 10,000 above the server's for gRPC, and refuses to start where there is
none (server_args.py, _handle_deprecated_args). One in five of Linux's usual free ports is higher."""
PORT_TRIES = 64
PORT_IN_USE = "already in use"
"""Words of the system's message, and of SGLang's own check of ports under DP attention."""


class ServerProcess:
    """A server process is one `mrl.rollout.sglang.child` with all its descendants, in a session
    of its own."""

    def __init__(
        self, server_args: Mapping[str, Any], environment: Mapping[str, str], log_path: Path
    ) -> None:
        """`server_args` are SGLang's, without `host` and `port`; `environment` is on top of ours."""
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
        """How long each stopped process has been stopped, as observed by the checks."""

    def start(self) -> None:
        """Spawn the server on a free loopback port; it is not ready yet."""
        self.port = _free_port()
        self._parts, self._halted_s = {}, {}
        sweep()  # of engines that were killed with their trainers
        self._scratch = scratch = Scratch("sglang")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log, children_without_usr1():
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "mrl.rollout.sglang.child"],
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
        # Broken where it died at once; whoever waits for it reads the reason in the log.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(settings).encode())
            self._popen.stdin.close()

    def exit_code(self) -> int | None:
        """None while the server lives; minus the signal where one killed it."""
        popen = self._popen  # read once: a stop() in another thread forgets it
        return popen.poll() if popen else None

    @property
    def pid(self) -> int | None:
        popen = self._popen
        return popen.pid if popen else None

    def note_parts(self) -> None:
        """Remember the processes that SGLang gave names to: it cannot do without any of them.

        One that has died already is among them, as long as SGLang has not noticed. A child that a part
        forks to run another program has the name of the part until it runs it, and is left out.
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
        """The number of one that has ended. SGLang takes 5 to 15 seconds to find out by itself."""
        for pid, part in self._parts.items():
            try:
                if part.status() != psutil.STATUS_ZOMBIE:
                    continue
            except psutil.NoSuchProcess:
                pass
            return f"process {pid}"
        return None

    def halted_part(self, limit_s: float) -> str | None:
        """The name and number of a process that is stopped (SIGSTOP, a debugger) for more than
        `limit_s`. Answers of the others do not show it: a scheduler answers without its detokenizer."""
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
        """List the server and its descendants that still run: all processes of its session."""
        popen = self._popen
        return session_processes(popen.pid) if popen else []

    def note_shared_memory(self) -> None:
        """Remember what to unlink at stop(): of a process that has died, nobody can tell."""
        self._shared_memory |= shared_memory_files(self.tree())
        if self._scratch is not None:
            self._scratch.note(self._shared_memory)

    def log_text(self) -> str:
        """What this start of the server has logged."""
        if not self.log_path.exists():
            return ""
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def log_tail(self) -> str:
        """Return the last lines of the log and its path, for the notes of an exception."""
        lines = self.log_text().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"last lines of {self.log_path}:", *lines])

    def why(self) -> str:
        """Return the line of the log that says what went wrong, where one does, and its path."""
        found = cause(self.log_text(), self.exit_code())
        return f"{found}; its log is {self.log_path}" if found else f"its log is {self.log_path}"

    def has_port_clash(self) -> bool:
        """Whether this start failed, or is failing, for a port that another program has."""
        return PORT_IN_USE in self.log_text().lower()

    def ending(self, code: int) -> str:
        """Return the exit code and why, in one line, for error messages."""
        clash = f" ({PORT_CLASH})" if self.has_port_clash() else ""
        return f"exit code {code}{clash}: {self.why()}"

    def kill(self) -> None:
        """End the server and its descendants at once; stop() clears away what they leave."""
        popen = self._popen
        if popen is not None:
            kill_session(popen.pid)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever of the session is left. Harmless when repeated."""
        popen = self._popen
        if popen is None:
            return
        atexit.unregister(self.stop)
        self.note_shared_memory()
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(TERM_GRACE_S)
        # The session's id cannot be reused while one of its processes is there.
        kill_session(popen.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(TERM_GRACE_S)
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
        paths = [self.environment.get("PYTHONPATH", ""), str(Path(mrl.__file__).parents[1])]
        paths.append(environment.get("PYTHONPATH", ""))
        environment.update(self.environment)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        address = self.server_args.get("dist_init_addr")
        if address is None:
            # A file instead of SGLang's TCP store, which would listen on every interface.
            store = f"file://{folder}/store"
            environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = store
        if address is None or is_loopback(address.rpartition(":")[0]):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment["TMPDIR"] = str(folder)  # Its sockets go with the folder.
        return environment


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "[::1]"


def _free_port() -> int:
    """Return a free loopback port up to HIGHEST_PORT. Raises OSError where the system gives none."""
    with contextlib.ExitStack() as held:  # the system gives another port each time
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
