"""Starts SGLang servers as forks of one process that has imported SGLang, for the whole test session.

A server start costs 11 CPU seconds here, 10 of which go into imports. `Template` is a process with the
environment and the plug-ins that `mrl.engines.sglang` gives to a server on CPUs, one for each set of
plug-ins. Each fork of it becomes the process that `ServerProcess` would have started: a session of
its own, the same settings on stdin, its log as stdout and stderr, and
`mrl.engines.sglang.child.main` to run.

`run_program` runs another program in such a fork, for tests that need what SGLang's imports leave.

Two things differ from a real start: the parent process is the template, and `/proc/PID/environ` shows
the template's environment. A start is real, a new Python, wherever a test starts a new Python for its
trainer, and under MRL_TEST_REAL_STARTS=1, which some tests set and `make test-all` sets for all.
"""

from __future__ import annotations

import array
import contextlib
import gc
import hashlib
import json
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

CHILD = "mrl.engines.sglang.child"
SESSION = "MRL_TEST_SESSION"
"""The environment variable with the process id of pytest, or of its controller under xdist."""
REAL = "MRL_TEST_REAL_STARTS"
START_TIMEOUT_S = 240.0
PROGRAM = "MRL_TEST_PROGRAM"
"""The environment variable with the Python source that a fork runs in place of the server."""
PER_START = {"TMPDIR", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "SGLANG_CPU_OMP_THREADS_BIND"}
"""Variables that differ between starts and that SGLang reads after its imports."""


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


def run_program(source: str, env: Mapping[str, str], log: Path) -> int:
    """Run a program with SGLang imported; what it prints goes to `log` -> its exit code.

    `env` is that of a server on CPUs.
    """
    with open(log, "wb") as output:
        if _may_fork(env):
            process = Fork({**env, PROGRAM: source}, output)
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

    def __init__(self, env: Mapping[str, str], log: IO[bytes]) -> None:
        self._connection = connect(env)
        read, write = os.pipe()
        request = json.dumps({"env": dict(env), "cwd": os.getcwd(), "parent": os.getpid()})
        fds = array.array("i", [read, log.fileno()])
        self._connection.sendall(len(request.encode()).to_bytes(4, "big"))
        self._connection.sendmsg(
            [request.encode()[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
        )
        self._connection.sendall(request.encode()[1:])
        os.close(read)
        self.stdin = os.fdopen(write, "wb")
        self.pid = int(_line(self._connection))
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
    session = os.environ[SESSION]
    folder = Path(tempfile.gettempdir(), f"mrl-tests-{session}")  # short: a socket's path must be
    folder.mkdir(exist_ok=True)
    folders = ":".join(dict.fromkeys(env["PYTHONPATH"].split(":")))
    name = hashlib.sha256(folders.encode()).hexdigest()[:8]
    address, log = folder / name, folder / f"{name}.log"
    with FileLock(folder / f"{name}.lock"):
        if not address.exists():
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.engine_starts", str(address), session],
                    env={k: v for k, v in env.items() if k not in PER_START},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            deadline = time.monotonic() + START_TIMEOUT_S
            while not address.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the template of SGLang did not start:\n{log.read_text()}")
                time.sleep(0.05)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    return connection


class Template:
    """Listens on a Unix socket; each connection is one fork, and is told its pid and its exit code."""

    def __init__(self, address: Path, ends_with: int) -> None:
        self._address, self._ends_with = address, ends_with
        self._running: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)

    def serve(self) -> None:
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        beside = self._address.with_suffix(".new")
        self._listener.bind(str(beside))
        self._listener.listen(64)
        beside.rename(self._address)  # whoever sees it can connect
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while _is_alive(self._ends_with) or self._running:
                for key, _ in selector.select(timeout=1.0):
                    if key.fileobj is wake:
                        with contextlib.suppress(BlockingIOError):
                            while wake.recv(64):
                                pass
                    else:
                        self._fork(self._listener.accept()[0], (wake, waker))
                self._reap()

    def _fork(self, connection: socket.socket, others: tuple[socket.socket, ...]) -> None:
        size = int.from_bytes(_receive(connection, 4), "big")
        first, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(8))
        fds = array.array("i")
        fds.frombytes(ancillary[0][2])
        request = json.loads(first + _receive(connection, size - 1))
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            self._running[pid] = connection
            connection.sendall(f"{pid}\n".encode())
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for held in (*others, self._listener, connection, *self._running.values()):
                held.close()
            _become_child(request, *fds)
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for pid, connection in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[pid]
                with connection, contextlib.suppress(OSError):  # its trainer may be gone
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _line(connection: socket.socket) -> bytes:
    """Byte by byte, so that nothing of the next line stays in a buffer; empty at the end."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return b""
        data += part
    return data


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the other side hung up")
        data += part
    return data


def _is_alive(pid: int) -> bool:
    """Whether it runs: one that has ended and that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _become_child(request: dict[str, Any], stdin: int, log: int) -> None:
    """What exec would have done, then the entry of the server process."""
    os.setsid()
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(log)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # read from TMPDIR again
    random.seed()
    sys.argv = ["-m"]
    parent, real = request["parent"], os.getppid()
    # The server dies with its trainer by looking at its parent process.
    os.getppid = lambda: parent if _is_alive(parent) else real
    if program := os.environ.pop(PROGRAM, ""):
        exec(compile(program, PROGRAM, "exec"), {"__name__": "__main__"})
        return
    from mrl.engines.sglang import child

    child.main()


def main() -> None:
    address, ends_with = Path(sys.argv[1]), int(sys.argv[2])
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import setproctitle
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler

    # The scheduler imports all of SGLang's models, and Megatron with one of them.
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry
    import sglang.srt.server_args  # noqa: F401

    # Its first call finds the memory of the title by way of the environment, which forks replace.
    setproctitle.setproctitle(setproctitle.getproctitle())
    gc.collect()
    gc.freeze()
    try:
        Template(address, ends_with).serve()
    finally:
        for left in address.parent.glob(f"{address.name}*"):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another template is still there
            address.parent.rmdir()


if __name__ == "__main__":
    main()
