"""The supervisor: a rollout rank's process under the launcher, which keeps a worker running.

A launcher ends the whole job when one of its ranks dies. Therefore the engine runs under a separate
process, the worker, and the supervisor starts another worker if the worker dies. The trainer has
connections to workers. A supervisor has one as well, by which rank 0 asks it for further engines
(engine_host.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta

import torch.distributed as dist

from mrl.config import Recipe, RolloutConfig
from mrl.engine_pool.remote.engine_host import EngineHost
from mrl.engine_pool.remote.engine_workers import (
    EngineWorkers,
    Job,
    answers,
    how_it_ended,
    wait_for_the_trainer,
)
from mrl.engine_pool.remote.wire import WAITS
from mrl.errors import ExitCode, InputError
from mrl.preflight.roles import Roles, check_engine_on_node
from mrl.run import console
from mrl.system.heartbeat import beat
from mrl.system.rendezvous import own_network

PREFIX = "mrl_rollout"
ADDRESS, HOST, OVER = "address", "host", "over"
"""Keys in the launcher's store: the address of the trainer's server, the host of each rollout rank
(with the rank's number appended), and a key that the trainer sets at the end of the run."""
POLL_S = 0.2
ENDED_S = 60.0
"""Seconds that a launcher may take to end its ranks after a rank has failed."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for a checkpoint. The trainers act on them and end the run; a supervisor only
records that they came."""


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
        wait_for_the_trainer(address, {"type": WAITS, "token": address["token"]})
        return ExitCode.DONE
    own = EngineWorkers(job, settings)
    with closing(EngineHost(own)) as host:
        code = _keep_a_worker(own, rank, store, received)
        if code is not None:
            return code
        host.report_end(engine)
        if host.wait_until_over():
            return ExitCode.DONE
    _wait_for_the_launcher(received)
    return ExitCode.LOST_RANK


def _keep_a_worker(
    own: EngineWorkers, rank: int, store: dist.Store, received: Sequence[int]
) -> int | None:
    """Run a worker, and start another one whenever a worker is lost, until the run is over. Return
    the exit code, or None if the engine was removed from the run. `received` are the signals that this
    process has received."""
    num_failed = 0
    job, settings = own.job, own.settings
    while True:
        code, has_joined = own.run_one()
        if own.is_leaving:
            return None
        if code in (ExitCode.DONE, ExitCode.BAD_INPUT):
            return code
        if not answers(settings["server"]):
            if _is_over(store):  # the worker started too late to receive `stop`
                return ExitCode.DONE
            _wait_for_the_launcher(received)
            return ExitCode.LOST_RANK
        how = how_it_ended(code)
        num_failed = 0 if has_joined else num_failed + 1
        if num_failed > job.rollout.max_restarts:
            own.report_gone(num_failed, f"{how}; see the messages of rank {rank}")
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


def _wait_for_the_launcher(received: Sequence[int]) -> None:
    """Wait at most ENDED_S seconds for SIGTERM from the launcher. If this rank exited before the
    rank that failed, the launcher would report this rank as the one that failed."""
    deadline = time.monotonic() + ENDED_S
    while signal.SIGTERM not in received and time.monotonic() < deadline:
        beat()
        time.sleep(0.1)


def _is_over(store: dist.Store) -> bool:
    """Return whether the trainer has announced the end of the run in the launcher's store."""
    with suppress(RuntimeError):  # the launcher's store is gone
        return store.check([OVER])
    return False
