"""Runs a worker as another user in its own namespaces, if this process is root.

    python -m mrl.system.worker_guard USER MODULE SPEC PARENT_PID ARGUMENTS...

There are three processes: the guard, which is killed with `PARENT_PID`; the first process of a PID
namespace, which is killed with the guard; and the worker, `python -m MODULE SPEC ...`. The first
two remain root and run no user code. When the first process of a namespace ends, Linux kills all
other processes in it, so nothing that the worker starts outlives it. The worker can neither see nor
signal processes outside.

The guard forwards what the worker writes to stderr, so the worker has no open files of the service.
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
"""CLONE_NEWNS, CLONE_NEWIPC and CLONE_NEWPID of <linux/sched.h>, for mounts, shared memory and
processes."""
MS_PRIVATE_ALL, MS_PLAIN = 0x40000 | 0x4000, 2 | 4 | 8
"""MS_PRIVATE | MS_REC, and MS_NOSUID | MS_NODEV | MS_NOEXEC of <linux/mount.h>."""


def main() -> None:
    user, module, spec, parent, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    is_isolated = _leave_namespaces()
    reader, stderr = os.pipe()
    first = os.fork()
    if not first:
        os.close(reader)
        _run_and_exit(stderr, user, [module, spec], arguments, is_isolated=is_isolated)
    for descriptor in (0, 1, stderr):
        os.close(descriptor)
    while text := os.read(reader, 1 << 16):
        with suppress(OSError):
            os.write(2, text)
    os._exit(_code(os.waitpid(first, 0)[1]))


def _leave_namespaces() -> bool:
    """Let the next child of this process be the first process of new namespaces.

    Return whether Linux allows new namespaces. If it does not, print a warning.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(NAMESPACES) == 0:
        return True
    why = os.strerror(ctypes.get_errno())
    print(
        f"mrl: warning: a worker gets no PID namespace ({why}): it can see other processes, and "
        "processes that it starts in a new session outlive it; give the service CAP_SYS_ADMIN",
        file=sys.stderr,
    )
    return False


def _run_and_exit(
    stderr: int, user: str, target: list[str], arguments: list[str], *, is_isolated: bool
) -> NoReturn:
    """Act as the first process of the namespace: start the worker, and exit when the worker exits.

    The exit code is the worker's. If `is_isolated` is false, there is no new namespace.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        guard = select.poll()
        guard.register(stderr, 0)
        if guard.poll(0):  # the pipe has no reader: the guard died before prctl
            os._exit(1)
        if is_isolated:
            _mount_proc()
        worker = os.fork()
        if not worker:
            _become_worker(stderr, user, target, arguments)
        for descriptor in (0, 1, 2, stderr):
            os.close(descriptor)
        while (ended := os.wait())[0] != worker:
            pass  # an orphan of the worker
        os._exit(_code(ended[1]))
    finally:
        os._exit(1)


def _mount_proc() -> None:
    """Mount a /proc that shows only the processes of this namespace.

    If Linux refuses, the machine's /proc remains visible.
    """
    library = ctypes.CDLL(None)
    if library.mount(b"none", b"/", None, MS_PRIVATE_ALL, None) == 0:
        library.mount(b"proc", b"/proc", b"proc", MS_PLAIN, None)


def _become_worker(stderr: int, user: str, target: list[str], arguments: list[str]) -> NoReturn:
    """Drop all root privileges permanently, and run the worker.

    If that fails, write an `input_error` as the worker's first line, and exit.
    """
    os.dup2(stderr, 2)
    os.close(stderr)
    try:
        entry = pwd.getpwnam(user)
        with suppress(OSError):
            # If memory runs out, the worker is killed first; lowering this needs CAP_SYS_RESOURCE.
            Path("/proc/self/oom_score_adj").write_text("1000")
        resource.setrlimit(
            resource.RLIMIT_CORE, (0, 0)
        )  # a core dump would contain the worker's data
        os.umask(0o077)
        _become(entry)
        if ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise InputError(
                "this Linux lacks PR_SET_NO_NEW_PRIVS, without which sudo would remain possible"
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
    """Return the exit code that a shell would give for a wait status: 128 + N after signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
