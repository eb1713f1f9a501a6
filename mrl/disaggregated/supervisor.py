"""This module is what a rollout rank does under its launcher: it keeps a worker running.

A launcher ends a job where one of its ranks dies. The engine and all that may fail with it are in a
worker, which the supervisor starts again; the trainer knows its workers by their connections alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mrl.config import Recipe, RolloutConfig
from mrl.errors import ExitCode, InputError
from mrl.preflight.roles import Roles, check_engine_on_node
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.processes import children_without_usr1
from mrl.system.rendezvous import own_network

PREFIX = "mrl_rollout"
ADDRESS, HOST, OVER = "address", "host", "over"
"""Keys of the launcher's store: where the server listens, where each rollout rank is, and a mark that
the trainer leaves when it has no more work."""
POLL_S = 0.2
ENDED_S = 60.0
"""How long a launcher may take to end its ranks after one of them has failed."""
BEAT_S = 1.0
"""The longest time between two signs of progress of a supervisor, whatever its worker does."""
EXIT_S = 30.0
"""How long a worker may take to exit once it has closed its pipe."""
_HEEDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Job:
    """Says what the workers of a job are."""

    module: str
    """`python -m MODULE` is a worker; it gets its settings as JSON on stdin."""
    settings: Mapping[str, Any]
    rollout: RolloutConfig
    wait_s: float
    """How long the trainers may take to start."""
    worker_timeout_s: float
    """Seconds without a sign after which a worker is killed."""


def job_of_run(recipe: Recipe, allowed: Sequence[str]) -> Job:
    """Return the job of a run of its own; `allowed` are the keys that may change in it."""
    settings = {"recipe": recipe.model_dump(mode="json"), "allowed": list(allowed)}
    timeout_s = recipe.asynchronous.worker_timeout_s
    return Job("mrl.disaggregated", settings, recipe.rollout, recipe.longest_wait_s, timeout_s)


def supervise(
    job: Job, roles: Roles, rank: int, store: dist.Store, look: Callable[[], None] = beat
) -> int:
    """Run the part of a rollout rank until the trainer says that the run is over; return the exit code.

    `look` is called while the trainers start.

    Only the first rank of an engine has a worker; the others hold a place, and a GPU, for the engine.
    Signals that ask for a save concern the trainers, who then end the run. Raises InputError where the
    engine would not be on one node; rank 0 raises it, too.
    """
    told: list[int] = []
    for number in _HEEDED:
        signal.signal(number, lambda number, frame: told.append(number))
    place = rank - roles.num_trainers
    meeting = dist.PrefixStore(PREFIX, store)
    meeting.set_timeout(timedelta(seconds=job.wait_s))
    engine, part = divmod(place, job.rollout.tensor_parallel_size)
    try:
        _tell_host(meeting, job.rollout, roles, rank)
        deadline = time.monotonic() + job.wait_s
        while not meeting.check([ADDRESS]) and time.monotonic() < deadline:
            if signal.SIGTERM in told:  # no step has begun that is to be saved
                return ExitCode.TERMINATED
            look()
            time.sleep(POLL_S)
        look()
        address = json.loads(meeting.get(ADDRESS))
    except RuntimeError as error:  # the store is in the launcher of the first node
        said = str(error).splitlines()[0]
        console.warning(f"rollout rank {rank}: the trainers are gone, or did not start: {said}")
        _wait_for_the_launcher(told)
        return ExitCode.LOST_RANK
    settings = {
        **address,
        **job.settings,
        "engine": engine,
        "world": roles.world,
        "parent": os.getpid(),
    }
    while True:
        if part:
            code = _wait_for_the_trainer(address["server"])
        else:
            code = _run_worker(job.module, settings, job.worker_timeout_s)
        if code in (ExitCode.DONE, ExitCode.BAD_INPUT):
            return code
        if not _answers(address["server"]):
            if _is_over(meeting):  # the worker came too late to hear of it
                return ExitCode.DONE
            _wait_for_the_launcher(told)
            return ExitCode.LOST_RANK
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        console.warning(f"rollout rank {rank}: its worker {how}; starting another one")


def _tell_host(meeting: dist.Store, rollout: RolloutConfig, roles: Roles, rank: int) -> None:
    """Tell rank 0 where this rank is, or why it cannot lead its engine. Raises InputError."""
    number = int(os.environ.get("LOCAL_RANK", str(rank)))
    last = rank - number + int(os.environ.get("LOCAL_WORLD_SIZE", str(roles.world))) - 1
    told = {"host": socket.gethostname(), "network": own_network(), "error": ""}
    try:
        check_engine_on_node(roles, rollout, rank, last)
    except InputError as error:
        told["error"] = str(error)
        raise
    finally:
        meeting.set(f"{HOST}_{rank - roles.num_trainers}", json.dumps(told))


def read_hosts(meeting: dist.Store, num_rollout: int) -> list[str]:
    """Wait for the rollout ranks and return the host of each: this host's name where loopback reaches
    it, and an empty name for another host of the same name.

    Raises InputError for what a rollout rank has found wrong.
    """
    found = [json.loads(meeting.get(f"{HOST}_{place}")) for place in range(num_rollout)]
    for told in found:
        if told["error"]:
            raise InputError(told["error"])
    here, network = socket.gethostname(), own_network()
    others = ["" if told["host"] == here else told["host"] for told in found]
    return [
        here if told["network"] == network else other
        for told, other in zip(found, others, strict=True)
    ]


def _run_worker(module: str, settings: dict[str, Any], timeout_s: float) -> int:
    """Run a worker and return its exit code; it is killed where it falls silent for `timeout_s`."""
    reader, writer = os.pipe()
    with children_without_usr1():
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            pass_fds=(writer,),
        )
    os.close(writer)
    try:
        with suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**settings, "pulse": writer}).encode())
            process.stdin.close()
        why = _wait_for_silence(reader, timeout_s)
        if not why:
            try:
                return process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                why = f"did not exit within {EXIT_S:g} s of its end"
        console.warning(f"rollout engine {settings['engine']}: its worker {why}")
        process.kill()
        return process.wait()  # Linux ends what is killed, but for a device that hangs
    finally:
        os.close(reader)


def _wait_for_silence(reader: int, timeout_s: float) -> str:
    """Wait until a worker has closed its pipe, or says nothing for long: return that. Only the time in
    which this process runs counts: where it was stopped, it has not listened."""
    silent_s = 0.0
    while silent_s < timeout_s:
        beat()
        wait_s = min(BEAT_S, timeout_s - silent_s)
        silent_s += wait_s
        if select.select([reader], [], [], wait_s)[0]:
            if not os.read(reader, 4096):
                return ""
            silent_s = 0.0
    return f"gave no sign for {timeout_s:g} s"


def _wait_for_the_trainer(address: Sequence[Any]) -> int:
    """Wait until the server has closed its connections. Where its node dies without a word, the
    watchdog ends this rank."""
    with suppress(OSError), socket.create_connection((address[0], address[1]), 60.0) as connection:
        while not select.select([connection], [], [], BEAT_S)[0]:
            beat()
        connection.recv(1)
    return ExitCode.DONE


def _wait_for_the_launcher(told: Sequence[int]) -> None:
    """Let the launcher end this rank: the rank that has failed is the one to report."""
    deadline = time.monotonic() + ENDED_S
    while signal.SIGTERM not in told and time.monotonic() < deadline:
        beat()
        time.sleep(0.1)


def _answers(address: Sequence[Any]) -> bool:
    with suppress(OSError):
        socket.create_connection((address[0], address[1]), 5.0).close()
        return True
    return False


def _is_over(meeting: dist.Store) -> bool:
    """Return whether the trainer has closed its server at the end of the run."""
    with suppress(RuntimeError):  # the launcher's store is gone
        return meeting.check([OVER])
    return False
