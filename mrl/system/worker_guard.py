"""Runs a worker as another user, in namespaces of its own, for root.

    python -m mrl.system.worker_guard USER MODULE SPEC PARENT_PID ARGUMENTS...

There are three processes: the guard, which is killed with `PARENT_PID`; the first process of a PID
namespace, which is killed with the guard; and the worker, `python -m MODULE SPEC ...`. The first two
stay root's and run no code of the user's. When the first process of a namespace ends, Linux kills all
others in it, so nothing that the worker leaves behind outlives it. The worker neither sees nor signals
any process outside.

What the worker writes to stderr passes through the guard: the worker holds no file of the service.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import resource
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from mrl.errors import InputError
from mrl.system.processes import PR_SET_PDEATHSIG, die_with_parent
from mrl.system.worker_user import check_open

PR_SET_NO_NEW_PRIVS = 38
NAMESPACES = 0x20000 | 0x8000000 | 0x20000000
"""CLONE_NEWNS, CLONE_NEWIPC and CLONE_NEWPID of <linux/sched.h>: mounts, shared memory, processes."""
MS_PRIVATE_ALL, MS_PLAIN = 0x40000 | 0x4000, 2 | 4 | 8
"""MS_PRIVATE | MS_REC, and MS_NOSUID | MS_NODEV | MS_NOEXEC of <linux/mount.h>."""


def main() -> None:
    user, module, spec, parent, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    is_apart = _leave_namespaces()
    said, saying = os.pipe()
    first = os.fork()
    if not first:
        os.close(said)
        _run_and_exit(saying, user, [module, spec], arguments, is_apart=is_apart)
    for descriptor in (0, 1, saying):
        os.close(descriptor)
    while text := os.read(said, 1 << 16):
        with suppress(OSError):
            os.write(2, text)
    os._exit(_code(os.waitpid(first, 0)[1]))


def _leave_namespaces() -> bool:
    """Let the next child be the first process of a namespace; return whether Linux allows that."""
    if ctypes.CDLL(None, use_errno=True).unshare(NAMESPACES) == 0:
        return True
    why = os.strerror(ctypes.get_errno())
    print(
        f"mrl: warning: a worker gets no PID namespace ({why}): it sees the processes of others, and "
        "what it leaves behind in a session of its own outlives it; give the service CAP_SYS_ADMIN",
        file=sys.stderr,
    )
    return False


def _run_and_exit(
    saying: int, user: str, target: list[str], arguments: list[str], *, is_apart: bool
) -> NoReturn:
    """Be the first process of the namespace: run the worker, and end with it."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        guard = select.poll()
        guard.register(saying, 0)
        if guard.poll(0):  # nobody reads: the guard died before prctl
            os._exit(1)
        if is_apart:
            _mount_proc()
        worker = os.fork()
        if not worker:
            _become_worker(saying, user, target, arguments)
        for descriptor in (0, 1, 2, saying):
            os.close(descriptor)
        while (ended := os.wait())[0] != worker:
            pass  # orphans of the worker's
        os._exit(_code(ended[1]))
    finally:
        os._exit(1)


def _mount_proc() -> None:
    """Show the processes of this namespace, and no others, in /proc; where that is refused, it shows
    those of the machine as before."""
    library = ctypes.CDLL(None)
    if library.mount(b"none", b"/", None, MS_PRIVATE_ALL, None) == 0:
        library.mount(b"proc", b"/proc", b"proc", MS_PLAIN, None)


def _become_worker(saying: int, user: str, target: list[str], arguments: list[str]) -> NoReturn:
    """Give up all rights of root, with no way back, and run the worker."""
    os.dup2(saying, 2)
    os.close(saying)
    try:
        entry = pwd.getpwnam(user)
        with suppress(OSError):
            # So the worker goes first where memory runs out; with CAP_SYS_RESOURCE it stays so.
            Path("/proc/self/oom_score_adj").write_text("1000")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core holds what the worker was sent
        os.umask(0o077)
        _become(entry)
        if ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise InputError(
                "Linux does not know PR_SET_NO_NEW_PRIVS, without which sudo stays open"
            )
        check_open(Path(sys.executable), "Python")
        words = [sys.executable, "-m", *target, str(os.getppid()), *arguments]
        os.execv(sys.executable, words)
    except (InputError, OSError) as error:
        line = json.dumps({"input_error": f"a worker as user {user}: {error}"})
        os.write(1, line.encode() + b"\n")
    finally:
        os._exit(1)


def _become(entry: pwd.struct_passwd) -> None:
    try:
        os.setgroups(os.getgrouplist(entry.pw_name, entry.pw_gid))
        os.setresgid(*[entry.pw_gid] * 3)
        os.setresuid(*[entry.pw_uid] * 3)
    except PermissionError:
        raise InputError(
            "this root may not change its user; give it CAP_SETUID and CAP_SETGID"
        ) from None


def _code(status: int) -> int:
    """Return the exit code of a shell for a process that ended so."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
