"""A reward that tries to leave its worker, and writes down what came of it."""

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

MARK = "left-behind-by-a-hostile-reward"
PR_SET_PDEATHSIG, PTRACE_ATTACH = 1, 16
if (OUT := Path(__file__).parent / "out").is_dir():
    (OUT / f"imported_by_{os.geteuid()}").touch()
REFUSALS = (errno.EPERM, errno.EACCES, errno.ESRCH)


def _daemon():
    """Leave a process behind in a session of its own, which nobody's death ends."""
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", MARK], start_new_session=True
        )
        os._exit(0)
    os.wait()


def _connect(path):
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path.name)


def _ptrace(pid):
    if ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_ATTACH, pid, None, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def attempts(service, other_run):
    """What is tried, by a name: each raises an OSError of `REFUSALS` where it is refused."""
    return {
        "write": lambda: (service / "planted").write_text("x"),
        "list": lambda: os.listdir(service),
        "token": (service / "token").read_text,
        "socket": lambda: _connect(service / "control.sock"),
        "rollouts": (other_run / "rollouts/step_000000.jsonl").read_text,
        "metrics": (other_run / "metrics.jsonl").read_text,
        "write_run": lambda: (other_run / "planted").write_text("x"),
        "signal": lambda: os.kill(os.getppid(), 9),
        "signal_anybody": lambda: os.kill(-1, 0),
        "ptrace": lambda: _ptrace(os.getppid()),
        "memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
        "environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
        "setuid": lambda: os.setresuid(0, 0, 0),
        "setgid": lambda: os.setresgid(0, 0, 0),
        "setgroups": lambda: os.setgroups([0]),
    }


def tried(service, other_run, *, is_alone):
    """Try everything; return what was managed, and who and where the worker is.

    `is_alone`: there is no process of its own that it could signal.
    """
    managed = {}
    for name, attempt in attempts(Path(service), Path(other_run)).items():
        if name == "signal_anybody" and not is_alone:
            continue
        try:
            managed[name] = repr(attempt())
        except OSError as error:
            if error.errno not in REFUSALS:
                managed[name] = repr(error)
    numbers = os.listdir("/proc/self/fd")
    held = {os.readlink(f"/proc/self/fd/{n}") for n in numbers if os.path.exists(f"/dev/fd/{n}")}
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "rights": [line.split() for line in status if line.startswith(("CapEff", "NoNewPrivs"))],
        "managed": managed,
        "uid": os.getresuid(),
        "groups": os.getgroups(),
        "files": sorted(name for name in held if name.startswith("/") and name != "/dev/null"),
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    }


def reward(prompts, completions, *, where, **columns):
    """Try everything in each call: later ones find more. The rows' column `where` has the service
    folder, the run folder of another tenant, and the file for the report of all calls."""
    service, other_run, report = where[0].split("|")
    before = json.loads(Path(report).read_text()) if Path(report).exists() else None
    said = tried(service, other_run, is_alone=before is None)
    if before is None:
        _daemon()
    else:
        said["managed"] |= before["managed"]
    Path(report).write_text(json.dumps(said))
    return [float(len(text)) for text in completions]


def hangs(prompts, completions, **columns):
    """Hang, with a child, where the death of no parent is heard."""
    _daemon()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    time.sleep(600)
