"""The processes that fork SGLang servers for the tests: see engine_starts.py, which talks to them."""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

PROGRAM = "MRL_TEST_PROGRAM"
"""The environment variable with the Python source that a fork runs in place of the server."""


class Template:
    """A server on a Unix socket that forks once for each connection. The connection then receives the
    fork's pid and, when it ends, its exit code."""

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
                        with contextlib.suppress(EOFError, OSError):  # its client may be gone
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
            _take_place(request, *fds)
            if "template" in request:
                _become_template(request, self._ends_with)
            else:
                _become_child(request)
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


def _take_place(request: dict[str, Any], stdin: int, log: int) -> None:
    """What exec would have done."""
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


def _become_child(request: dict[str, Any]) -> None:
    """The entry of the server process, or the program."""
    parent, real = request["parent"], os.getppid()
    # The server dies with its trainer by looking at its parent process.
    os.getppid = lambda: parent if _is_alive(parent) else real
    if program := os.environ.pop(PROGRAM, ""):
        exec(compile(program, PROGRAM, "exec"), {"__name__": "__main__"})
        return
    from mrl.engines.sglang import child

    child.main()


def _become_template(request: dict[str, Any], ends_with: int) -> None:
    """Load the plug-ins of PYTHONPATH, and serve."""
    folders = list(dict.fromkeys(os.environ["PYTHONPATH"].split(":")))
    sys.path[:] = [*folders, *(each for each in sys.path if each not in folders)]
    importlib.invalidate_caches()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    _serve(Path(request["template"]), ends_with)


def _serve(address: Path, ends_with: int) -> None:
    gc.collect()
    gc.freeze()
    try:
        Template(address, ends_with).serve()
    finally:
        for left in address.parent.glob(f"{address.name}*"):
            left.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another one is still there
            address.parent.rmdir()


def main() -> None:
    """The root: SGLang's imports, before which those plug-ins act that must come first."""
    gc.disable()  # as in a server: collecting between imports takes a quarter of their time
    importlib.import_module("mrl_memory_saver").register()
    importlib.import_module("mrl_sglang_cpu").give_cpu_module()
    import setproctitle
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler

    # The scheduler imports all of SGLang's models.
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry
    import sglang.srt.server_args  # noqa: F401

    # Its first call finds the memory of the title by way of the environment, which forks replace.
    setproctitle.setproctitle(setproctitle.getproctitle())
    gc.enable()
    _serve(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
