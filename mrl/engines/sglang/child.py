"""The entry point of the server process: `python -m mrl.engines.sglang.child`, with settings on stdin.

The settings are one JSON object {"server_args": {...}, "parent_pid": int, "scratch": str}.
`scratch` is the server's folder for temporary files. The API key is in `server_args` and is passed
in no other way, because other users of the machine can read a command line, and other processes of
this user can read an environment.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import threading
import time

from mrl.engines.sglang.compat import take
from mrl.engines.sglang.leftovers import kill_session

PARENT_POLL_S = 0.5


def main() -> None:
    # SLURM may send this signal to every process of a job. The ranks save a checkpoint then, and need
    # their engine until it is saved.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    settings = json.loads(sys.stdin.buffer.read())
    _die_with_parent(settings["parent_pid"], settings["scratch"])

    if settings["server_args"].get("device") == "cpu":
        # Collecting garbage between imports takes a quarter of their time, and finds nothing that
        # stays. The plug-in plugins/cpu turns it on again before the server forks.
        gc.disable()
    take("load_plugins")()
    run_server, server_args = take("run_server"), take("ServerArgs")
    try:
        run_server(server_args(**settings["server_args"]))
    finally:
        take("kill_process_tree")(os.getpid(), include_parent=False)


def _die_with_parent(parent_pid: int, scratch: str) -> None:
    """Kill this whole session, schedulers included, and delete the folder `scratch`, when the
    trainer dies for any reason.

    PR_SET_PDEATHSIG is not enough: it fires when the *thread* that started this process ends, and it
    kills only this process. Schedulers that are still importing would then keep running.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
        kill_session(os.getsid(0), spare=os.getpid())
        shutil.rmtree(scratch, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    main()
