"""Starts SGLang servers as forks of one process that has imported SGLang, for the whole test session.

A server start costs 11 CPU seconds here, 10 of which go into imports. One process (the root in
engine_template.py) imports SGLang without plug-ins. `Template` is a fork of it that has loaded the
plug-ins which `mrl.engines.sglang` gives to a server on CPUs, one for each set of plug-ins. Each fork
of a template becomes the process that `ServerProcess` would have started: a session of its own, the
same settings on stdin, its log as stdout and stderr, and `mrl.engines.sglang.child.main` to run.

`run_program` runs another program in such a fork, for tests that need what SGLang's imports leave.

Three things differ from a real start: the parent process is the template, `/proc/PID/environ` shows
the root's environment, and the plug-ins are loaded after SGLang's modules, not before most of them
(SGLang replaces a hooked function in all modules that have imported it). A start is real, a new
Python, wherever a test starts a new Python for its trainer, and under MRL_TEST_REAL_STARTS=1, which
some tests set and `make test-all` sets for all.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from tests.engine_template import PROGRAM

CHILD = "mrl.engines.sglang.child"
SESSION = "MRL_TEST_SESSION"
"""The environment variable with the process id of pytest, or of its controller under xdist."""
REAL = "MRL_TEST_REAL_STARTS"
START_TIMEOUT_S = 240.0
PER_START = {"TMPDIR", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "SGLANG_CPU_OMP_THREADS_BIND"}
"""Variables that differ between starts and that SGLang reads after its imports."""
READ_BY_IMPORTS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""A variable that SGLang reads while it is imported."""
READ_BY_PLUGINS = "MRL_QUANTIZATION"
"""A variable that a plug-in reads while it is loaded."""


def use_template() -> None:
    """Let `ServerProcess` fork its servers from the template of this session; the first use starts it.

    All pytest workers share it, and ranks that are forked from them use it too.
    """
    from mrl.engines.sglang import process

    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    os.environ[SESSION] = str(session)
    process.subprocess = _Subprocess()  # pyright: ignore[reportAttributeAccessIssue]


class _Subprocess:
    """Stands in for the module `subprocess` in mrl/engines/sglang/process.py."""

    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT
    TimeoutExpired = subprocess.TimeoutExpired

    def Popen(self, command: Sequence[str], *, env: dict[str, str], **options: Any) -> Any:
        if list(command[1:]) != ["-m", CHILD] or not _may_fork(env):
            return subprocess.Popen(command, env=env, **options)
        return Fork(env, options["stdout"])


def _may_fork(env: Mapping[str, str]) -> bool:
    """Whether it is a server on CPUs, and nobody wants a real start."""
    return env.get("SGLANG_USE_CPU_ENGINE") == "1" and env.get(REAL) != "1"


def run_program(
    source: str, env: Mapping[str, str], log: Path, *, with_plugins: bool = True
) -> int:
    """Run a program with SGLang imported; what it prints goes to `log` -> its exit code.

    `env` is that of a server on CPUs. Without plug-ins the functions are those of SGLang itself.
    """
    with open(log, "wb") as output:
        if _may_fork(env):
            process = Fork({**env, PROGRAM: source}, output, with_plugins=with_plugins)
            process.stdin.close()
        else:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", source],
                env=env,
                stdout=output,
                stderr=output,
            )
        return process.wait(START_TIMEOUT_S)


class Fork:
    """A server that was forked from the template; the part of subprocess.Popen that mrl uses."""

    def __init__(
        self, env: Mapping[str, str], log: IO[bytes], *, with_plugins: bool = True
    ) -> None:
        self._connection = connect(env) if with_plugins else _connected(_root(env))
        read, write = os.pipe()
        request = {"env": dict(env), "cwd": os.getcwd(), "parent": os.getpid()}
        self.pid = _ask(self._connection, request, read, log.fileno())
        os.close(read)
        self.stdin = os.fdopen(write, "wb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._connection], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(CHILD, timeout or 0.0)
            line = _line(self._connection)
            # Without an answer the template itself has died, and its forks with it.
            self.returncode = int(line) if line else -signal.SIGKILL
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, as for Popen
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def connect(env: Mapping[str, str]) -> socket.socket:
    """A connection to this session's template for `env`, which the first one to ask starts.

    There is one for each set of plug-ins, that is for each PYTHONPATH less what is in it twice.
    """
    folders = _folders(env)
    template = _address(*folders, env.get(READ_BY_IMPORTS, ""), env.get(READ_BY_PLUGINS, ""))
    with FileLock(template.with_suffix(".lock")):
        if not template.exists():
            _start_template(template, _root(env), env)
    return _connected(template)


def _folders(env: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(env["PYTHONPATH"].split(":")))


def _address(*key: str) -> Path:
    folder = Path(tempfile.gettempdir(), f"mrl-tests-{os.environ[SESSION]}")  # short, as it must be
    folder.mkdir(exist_ok=True)
    return folder / hashlib.sha256(":".join(key).encode()).hexdigest()[:8]


def _connected(address: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    return connection


def _start_template(address: Path, root: Path, env: Mapping[str, str]) -> None:
    """Let the root fork the template for `env`."""
    request = {"env": {k: v for k, v in env.items() if k not in PER_START}, "cwd": os.getcwd()}
    with _connected(root) as connection:
        with open(address.with_suffix(".log"), "ab") as log, open(os.devnull, "rb") as nothing:
            _ask(connection, {**request, "template": str(address)}, nothing.fileno(), log.fileno())
        _wait_for(address, lambda: bool(select.select([connection], [], [], 0.0)[0]))


def _root(env: Mapping[str, str]) -> Path:
    """The address of the root whose imports are those of `env`; the first one to ask starts it.

    Of the folders of plug-ins it has those that every server on CPUs has, and it loads no plug-in.
    """
    from mrl.engines.sglang.settings import CPU_STUBS, SERVER_PLUGIN

    every = {str(SERVER_PLUGIN), str(CPU_STUBS)}
    path = ":".join(each for each in _folders(env) if each in every or not _has_plugin(each))
    root = _address("root", path, env.get(READ_BY_IMPORTS, ""))
    with FileLock(root.with_suffix(".lock")):
        if not root.exists():
            given = {k: v for k, v in env.items() if k not in PER_START}
            with open(root.with_suffix(".log"), "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.engine_template", str(root), os.environ[SESSION]],
                    env={**given, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            _wait_for(root, lambda: process.poll() is not None)
    return root


def _has_plugin(folder: str) -> bool:
    files = Path(folder).glob("*.dist-info/entry_points.txt")
    return any("[sglang.srt.plugins]" in file.read_text() for file in files)


def _wait_for(address: Path, has_ended: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not address.exists():
        if has_ended() or time.monotonic() > deadline:
            log = address.with_suffix(".log").read_text()
            raise RuntimeError(f"the template of SGLang did not start:\n{log}")
        time.sleep(0.05)


def _ask(connection: socket.socket, request: dict[str, Any], stdin: int, log: int) -> int:
    """Ask for a fork with these file descriptors -> its pid."""
    data = json.dumps(request).encode()
    fds = array.array("i", [stdin, log])
    connection.sendall(len(data).to_bytes(4, "big"))
    connection.sendmsg([data[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())])
    connection.sendall(data[1:])
    return int(_line(connection))


def _line(connection: socket.socket) -> bytes:
    """Byte by byte, so that nothing of the next line stays in a buffer; empty at the end."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return b""
        data += part
    return data
