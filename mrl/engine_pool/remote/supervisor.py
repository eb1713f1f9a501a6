"""The supervisor: a rollout rank's process under the launcher, which keeps a worker running.

A launcher ends the whole job when one of its ranks dies. Therefore the engine runs under a separate
process, the worker, and the supervisor starts another worker if the worker dies. The trainer has
connections to workers, not to supervisors.
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
from mrl.engine_pool.remote.messages import failed_message
from mrl.engine_pool.remote.process import CONNECT_S
from mrl.engine_pool.remote.wire import WAITS, Wire, WireClosed
from mrl.errors import EngineGone, ExitCode, InputError
from mrl.preflight.roles import Roles, check_engine_on_node
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.proc import is_stopped
from mrl.system.processes import children_without_usr1
from mrl.system.rendezvous import own_network

PREFIX = "mrl_rollout"
ADDRESS, HOST, OVER = "address", "host", "over"
"""Keys in the launcher's store: the address of the trainer's server, the host of each rollout rank
(with the rank's number appended), and a key that the trainer sets at the end of the run."""
POLL_S = 0.2
ENDED_S = 60.0
"""Seconds that a launcher may take to end its ranks after a rank has failed."""
BEAT_S = 1.0
"""Maximum time in seconds between two heartbeats of a supervisor, whatever its worker does."""
EXIT_S = 30.0
"""Seconds that a worker may take to exit after it has closed its pipe."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for a checkpoint. The trainers act on them and end the run; a supervisor only
records that they came."""


@dataclass(frozen=True)
class Job:
    """How a supervisor starts and watches the workers of a run or of a service."""

    module: str
    """The module that `python -m` runs as a worker. The worker reads its settings from stdin as JSON.
    """
    settings: Mapping[str, Any]
    """The worker's settings, apart from those that `supervise` adds."""
    rollout: RolloutConfig
    wait_s: float
    """Seconds that the trainers may take to start."""
    worker_timeout_s: float
    """Seconds without a heartbeat after which a worker is killed. The first heartbeat may take
    `rollout.start_timeout_s` seconds."""


def job_of_run(recipe: Recipe, allowed: Sequence[str]) -> Job:
    """Return the job of a run without a service. `allowed` are the recipe keys that may change when
    the run is continued."""
    settings = {"recipe": recipe.model_dump(mode="json"), "allowed": list(allowed)}
    timeout_s = recipe.asynchronous.worker_timeout_s
    return Job("mrl.engine_pool.remote", settings, recipe.rollout, recipe.longest_wait_s, timeout_s)


def supervise(
    job: Job, roles: Roles, rank: int, store: dist.Store, meanwhile: Callable[[], None] = beat
) -> int:
    """Do the work of the rollout rank `rank` until the run is over, and return the exit code.

    `meanwhile` is called repeatedly while the trainers start. Only the first rank of an engine
    starts a worker; the engine's other ranks only reserve their GPUs. Raises InputError if the
    ranks of the engine are not on one node; then rank 0 of the trainers raises it, too.
    """
    received: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    store = dist.PrefixStore(PREFIX, store)
    store.set_timeout(timedelta(seconds=job.wait_s))
    engine, part = divmod(rank - roles.num_trainers, job.rollout.tensor_parallel_size)
    try:
        _publish_host(store, job.rollout, roles, rank)
        deadline = time.monotonic() + job.wait_s
        while not store.check([ADDRESS]) and time.monotonic() < deadline:
            if signal.SIGTERM in received:  # the run has not begun, so no trainer saves
                return ExitCode.TERMINATED
            meanwhile()
            time.sleep(POLL_S)
        meanwhile()
        address = json.loads(store.get(ADDRESS))
    except RuntimeError as error:  # the launcher of the first node, which has the store, is gone
        reason = str(error).splitlines()[0]
        console.warning(f"rollout rank {rank}: the trainers are gone, or did not start: {reason}")
        _wait_for_the_launcher(received)
        return ExitCode.LOST_RANK
    settings = {
        **address,
        **job.settings,
        "engine": engine,
        "world": roles.world,
        "parent": os.getpid(),
    }
    if part:
        _wait_for_the_trainer(address, {"type": WAITS, "token": address["token"]})
        return ExitCode.DONE
    return _keep_a_worker(job, settings, rank, store, received)


def _keep_a_worker(
    job: Job, settings: dict[str, Any], rank: int, store: dist.Store, received: Sequence[int]
) -> int:
    """Run a worker, and start another one whenever a worker is lost, until the run is over. Return
    the exit code. `received` are the signals that this process has received."""
    num_failed = 0
    while True:
        code, has_joined = _run_worker(job, settings)
        if code in (ExitCode.DONE, ExitCode.BAD_INPUT):
            return code
        if not _answers(settings["server"]):
            if _is_over(store):  # the worker started too late to receive `stop`
                return ExitCode.DONE
            _wait_for_the_launcher(received)
            return ExitCode.LOST_RANK
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        num_failed = 0 if has_joined else num_failed + 1
        if num_failed > job.rollout.max_restarts:
            gone = EngineGone(
                f"{num_failed} workers in a row ended before they joined, more than "
                f"rollout.max_restarts={job.rollout.max_restarts}; the last one {how}; see the "
                f"messages of rank {rank}"
            )
            hello = {key: settings[key] for key in ("token", "engine")} | {"type": "hello"}
            _wait_for_the_trainer(settings, hello, failed_message(gone))
            _wait_for_the_launcher(received)
            return ExitCode.LOST_ENGINE
        console.warning(f"rollout rank {rank}: its worker {how}; starting another one")


def _publish_host(store: dist.Store, rollout: RolloutConfig, roles: Roles, rank: int) -> None:
    """Write this rank's host to the store, where rank 0 reads it. If the engine's ranks are not on one
    node, also write an error message for rank 0, and raise InputError."""
    number = int(os.environ.get("LOCAL_RANK", str(rank)))
    last = rank - number + int(os.environ.get("LOCAL_WORLD_SIZE", str(roles.world))) - 1
    entry = {"host": socket.gethostname(), "network": own_network(), "error": ""}
    try:
        check_engine_on_node(roles, rollout, rank, last)
    except InputError as error:
        entry["error"] = str(error)
        raise
    finally:
        store.set(f"{HOST}_{rank - roles.num_trainers}", json.dumps(entry))


def read_hosts(store: dist.Store, num_rollout: int) -> list[str]:
    """Wait for the rollout ranks and return the host name of each rank.

    This host's name is returned only for ranks that can be reached through loopback. For a rank on
    another host with the same name, the returned name is empty. Raises InputError if a rollout rank
    has reported an error.
    """
    entries = [json.loads(store.get(f"{HOST}_{number}")) for number in range(num_rollout)]
    for entry in entries:
        if entry["error"]:
            raise InputError(entry["error"])
    here, network = socket.gethostname(), own_network()

    def host(entry: dict[str, str]) -> str:
        if entry["network"] == network:
            return here
        return "" if entry["host"] == here else entry["host"]

    return [host(entry) for entry in entries]


def _run_worker(job: Job, settings: dict[str, Any]) -> tuple[int, bool]:
    """Run a worker until it ends. Return its exit code, and whether it has joined the trainer.

    A worker sends its first heartbeat when it has joined the trainer. The worker is killed if its
    heartbeats stop.
    """
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
    """Wait until a worker closes its pipe or its heartbeats stop.

    Returns (why the worker counts as lost, whether it has sent a heartbeat). The reason is empty if the
    worker has closed the pipe. The first heartbeat may take `start_s` seconds, because it follows the
    worker's imports. Each later heartbeat may take `later_s` seconds. A worker that is stopped
    (SIGSTOP) for `later_s` seconds counts as lost, too. Time in which this process itself does not run
    is not counted.
    """
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


def _wait_for_the_trainer(address: Mapping[str, Any], *messages: Mapping[str, Any]) -> None:
    """Connect to the trainer, send it messages, and wait until it ends the run or its process ends.

    If the trainer's node is lost, this wait does not end by itself; the watchdog then ends this
    rank.
    """
    with suppress(OSError, WireClosed):
        connection = socket.create_connection(tuple(address["server"]), CONNECT_S)
        wire = Wire(connection)
        for message in messages:
            wire.send(message)
        answer: dict[str, Any] = {}
        while answer.get("type") != "stop":
            while not select.select([connection], [], [], BEAT_S)[0]:
                beat()
            answer, _ = wire.receive()
        wire.close()


def _wait_for_the_launcher(received: Sequence[int]) -> None:
    """Wait at most ENDED_S seconds for SIGTERM from the launcher. If this rank exited before the
    rank that failed, the launcher would report this rank as the one that failed."""
    deadline = time.monotonic() + ENDED_S
    while signal.SIGTERM not in received and time.monotonic() < deadline:
        beat()
        time.sleep(0.1)


def _answers(address: Sequence[Any]) -> bool:
    with suppress(OSError):
        socket.create_connection((address[0], address[1]), 5.0).close()
        return True
    return False


def _is_over(store: dist.Store) -> bool:
    """Return whether the trainer has announced the end of the run in the launcher's store."""
    with suppress(RuntimeError):  # the launcher's store is gone
        return store.check([OVER])
    return False
