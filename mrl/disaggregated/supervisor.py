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
from mrl.disaggregated.wire import WAITS, Wire, WireClosed
from mrl.errors import EngineGone, ExitCode, InputError
from mrl.preflight.roles import Roles, check_engine_on_node
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.proc import is_stopped
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
"""The longest time between two heartbeats of a supervisor, whatever its worker does."""
ANSWER_S = 60.0
"""How long the server may take to let this rank connect."""
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
    """Seconds without a heartbeat after which a worker is killed; the first heartbeat may take
    `rollout.start_timeout_s`."""


def job_of_run(recipe: Recipe, allowed: Sequence[str]) -> Job:
    """Return the job of a run of its own; `allowed` are the keys that may change in it."""
    settings = {"recipe": recipe.model_dump(mode="json"), "allowed": list(allowed)}
    timeout_s = recipe.asynchronous.worker_timeout_s
    return Job("mrl.disaggregated", settings, recipe.rollout, recipe.longest_wait_s, timeout_s)


def supervise(
    job: Job, roles: Roles, rank: int, store: dist.Store, look: Callable[[], None] = beat
) -> int:
    """Run the part of a rollout rank until the trainer says that the run is over; return the exit code.

    `look` is called repeatedly while the trainers start.

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
    if part:
        return _wait_for_the_trainer(address)
    return _keep_a_worker(job, settings, rank, meeting, told)


def _keep_a_worker(
    job: Job, settings: dict[str, Any], rank: int, meeting: dist.Store, told: Sequence[int]
) -> int:
    """Start a worker, and another one if it is lost, until the run is over; return the exit code."""
    num_failed = 0
    while True:
        code, has_joined = _run_worker(job, settings)
        if code in (ExitCode.DONE, ExitCode.BAD_INPUT):
            return code
        if not _answers(settings["server"]):
            if _is_over(meeting):  # the worker came too late to hear of it
                return ExitCode.DONE
            _wait_for_the_launcher(told)
            return ExitCode.LOST_RANK
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        num_failed = 0 if has_joined else num_failed + 1
        if num_failed > job.rollout.max_restarts:
            _report_failed(
                settings,
                f"{num_failed} workers in a row ended before they joined, more than "
                f"rollout.max_restarts={job.rollout.max_restarts}; the last one {how}; see the "
                f"messages of rank {rank}",
            )
            _wait_for_the_launcher(told)
            return ExitCode.LOST_ENGINE
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


def _run_worker(job: Job, settings: dict[str, Any]) -> tuple[int, bool]:
    """Run a worker; return its exit code, and whether it joined, which its first heartbeat shows. A
    worker whose heartbeats stop is killed."""
    reader, writer = os.pipe()
    with children_without_usr1():
        process = subprocess.Popen(
            [sys.executable, "-m", job.module],
            stdin=subprocess.PIPE,
            pass_fds=(writer,),
        )
    os.close(writer)
    try:
        with suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(json.dumps({**settings, "pulse": writer}).encode())
            process.stdin.close()
        start_s, later_s = job.rollout.start_timeout_s, job.worker_timeout_s
        why, has_joined = _wait_for_silence(reader, process.pid, start_s, later_s)
        if not why:
            try:
                return process.wait(EXIT_S), has_joined
            except subprocess.TimeoutExpired:
                why = f"did not exit within {EXIT_S:g} s of its end"
        console.warning(f"rollout engine {settings['engine']}: its worker {why}")
        process.kill()
        return process.wait(), has_joined  # returns after a kill, unless a device hangs
    finally:
        os.close(reader)


def _wait_for_silence(reader: int, pid: int, start_s: float, later_s: float) -> tuple[str, bool]:
    """Wait until a worker has closed its pipe, or its heartbeats stop; return (why it counts as lost,
    empty if it closed the pipe; whether it sent a heartbeat).

    The first heartbeat, after its imports, may take `start_s`; a later one, or one of a stopped worker,
    `later_s`. Only the time in which this process itself runs counts."""
    silent_s, stopped_s, has_joined = 0.0, 0.0, False
    while silent_s < (later_s if has_joined else start_s) and stopped_s < later_s:
        beat()
        wait_s = min(BEAT_S, later_s)
        silent_s += wait_s
        stopped_s = stopped_s + wait_s if is_stopped(pid) else 0.0
        if select.select([reader], [], [], wait_s)[0]:
            if not os.read(reader, 4096):
                return "", has_joined
            silent_s, stopped_s, has_joined = 0.0, 0.0, True
    if stopped_s >= later_s:
        return f"is stopped (SIGSTOP) for {stopped_s:g} s", has_joined
    return f"sent no heartbeat for {silent_s:g} s", has_joined


def _report_failed(settings: Mapping[str, Any], text: str) -> None:
    """Report to the trainer, in place of a worker, that none can be started here; wait until it has
    received that."""
    with suppress(OSError, WireClosed):
        connection = socket.create_connection(tuple(settings["server"]), ANSWER_S)
        wire = Wire(connection)
        wire.send({"type": "hello", "token": settings["token"], "engine": settings["engine"]})
        wire.send({"type": "failed", "error": EngineGone.__name__, "text": text})
        message: dict[str, Any] = {}
        while message.get("type") != "stop":
            _wait_for_words(connection)
            message, _ = wire.receive()
        wire.close()


def _wait_for_the_trainer(address: Mapping[str, Any]) -> int:
    """Wait until the server, or its process, has ended. If its whole node is lost, the watchdog ends
    this rank."""
    with suppress(OSError, WireClosed):
        connection = socket.create_connection(tuple(address["server"]), ANSWER_S)
        wire = Wire(connection)
        wire.send({"type": WAITS, "token": address["token"]})
        _wait_for_words(connection)
        wire.close()
    return ExitCode.DONE


def _wait_for_words(connection: socket.socket) -> None:
    """Wait until data has arrived, or the other side has closed the connection."""
    while not select.select([connection], [], [], BEAT_S)[0]:
        beat()


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
