"""Starts the watchdog of a run: each rank opens its page, and rank 0 starts the monitor."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.config import Recipe
from mrl.system import heartbeat
from mrl.system.processes import children_without_usr1

_ROOT = Path(__file__).parents[2]
_MONITOR = (
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from mrl.watch.monitor import main; main()"
)
_FILES_S = 600.0
"""How long a file system may take over a save without being called hung."""


@contextmanager
def watching(recipe: Recipe, folder: Path, command: str) -> Iterator[None]:
    """Watch the ranks during the block; `command` continues the run. A collective.

    Where the ranks are on several nodes nothing is watched yet.
    """
    if not recipe.watch.enabled:
        yield
        return
    with ExitStack() as undo:
        page = heartbeat.open_page()
        undo.callback(heartbeat.close_page)
        stacks = _heed_stacks(undo)
        own = {"rank": dist.get_rank(), "pid": os.getpid(), "page": page, "stacks": stacks}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (socket.gethostname(), own))
        hosts = {host for host, _ in ranks}
        if own["rank"] == 0 and len(hosts) == 1:
            job = {
                "parent": os.getpid(),
                "ranks": [each for _, each in ranks],
                "limits": {
                    "given": recipe.watch.limits,
                    "least": least_limits(recipe),
                    "first_s": recipe.watch.first_limit_s,
                },
                "folder": str(folder),
                "command": command,
            }
            _start_monitor(job, undo)
        yield


def least_limits(recipe: Recipe) -> dict[str, float]:
    """Return, by phase, the seconds that its own waits may take by the recipe: calls of an engine, the
    start of another one, reward calls. The watchdog must not end what these would recover."""
    rollout = recipe.rollout
    engine = rollout.stall_timeout_s + rollout.start_timeout_s
    request = rollout.request_timeout_s + engine
    rewards = (rollout.samples_per_prompt + 1) * recipe.reward_timeout_s
    return {
        "start": recipe.watch.first_limit_s,
        "sync": engine,
        "rollout": request + rewards,
        "evaluate": request + rewards,
        "score": rewards,
        "save": _FILES_S,
        "log": recipe.watch.first_limit_s,  # user code, as in callbacks, and trackers
    }


def _heed_stacks(undo: ExitStack) -> str:
    """Let SIGUSR2 write the stacks of all threads to a file without a name; return its path."""
    descriptor = os.memfd_create("mrl-stacks")
    undo.callback(os.close, descriptor)
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    undo.callback(faulthandler.unregister, signal.SIGUSR2)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _start_monitor(job: dict[str, Any], undo: ExitStack) -> None:
    with children_without_usr1():
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _MONITOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the trainer alone
        )
    undo.callback(_stop_monitor, process)
    assert process.stdin
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()


def _stop_monitor(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
