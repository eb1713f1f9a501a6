"""This module is the entry of the server process: `python -m mrl.rollout.sglang.child`, with
settings on stdin.

Settings come as one JSON object {"server_args": {...}, "parent_pid": int, "scratch": str}.
stdin is the only place that the API key passes: command lines and environments can be read by
other users of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time

from mrl.rollout.sglang.compat import take
from mrl.rollout.sglang.leftovers import kill_session

PARENT_POLL_S = 0.5


def main() -> None:
    # SLURM may tell every process of a job; the ranks save, and need their engine until then.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    settings = json.loads(sys.stdin.buffer.read())
    _die_with_parent(settings["parent_pid"], settings["scratch"])

    take("load_plugins")()
    run_server, server_args = take("run_server"), take("ServerArgs")
    try:
        run_server(server_args(**settings["server_args"]))
    finally:
        take("kill_process_tree")(os.getpid(), include_parent=False)


def _die_with_parent(parent_pid: int, scratch: str) -> None:
    """Kill this whole session, schedulers included, when the trainer dies, however it dies.

    PR_SET_PDEATHSIG would not do: it fires when the *thread* that started this process ends, it
    ends this process alone, and schedulers that are still importing then never learn of it.
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
