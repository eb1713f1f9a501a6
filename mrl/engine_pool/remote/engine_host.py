"""Starts further engines on the machine of a rollout rank, as the trainer's messages demand.

Each rollout rank that leads an engine has a connection for this to rank 0 of the trainers
(mrl/engine_pool/elastic/membership.py), in a thread. Each further engine has a thread, too, whose end
would end the worker's process with it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from mrl.engine_pool.remote.engine_workers import EXIT_S, EngineWorkers, answers, how_it_ended
from mrl.engine_pool.remote.process import CONNECT_S
from mrl.engine_pool.remote.wire import RANK, Wire, WireClosed
from mrl.errors import ExitCode
from mrl.run import console
from mrl.system.heartbeat import beat

POLL_S = 0.2


class EngineHost:
    """Starts and ends engines beside the one that a rollout rank leads."""

    def __init__(self, own: EngineWorkers) -> None:
        """`own` are the workers of the rank's own engine. They can be removed, like others."""
        self._own, self._wire = own, None
        self._workers = {int(own.settings["engine"]): own}
        self._threads: list[threading.Thread] = []
        self._is_over, self._is_lost = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="mrl-host", daemon=True).start()

    def report_end(self, number: int, why: str = "") -> None:
        """Tell the trainer that an engine has no worker any more. `why`: what went wrong, if anything
        did."""
        if self._wire is not None:
            with suppress(WireClosed):
                self._wire.send({"type": "ended", "engine": number, "why": why})

    def wait_until_over(self) -> bool:
        """Wait until the run is over. Return False if the trainer has gone without saying so."""
        while not (self._is_over.is_set() or self._is_lost.is_set()):
            beat()
            time.sleep(POLL_S)
        return self._is_over.is_set()

    def close(self) -> None:
        """Wait until the further engines have ended, and kill those that do not."""
        deadline = time.monotonic() + EXIT_S
        others = [each for each in self._workers.values() if each is not self._own]
        for workers in others:
            workers.leave()
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                beat()
                thread.join(POLL_S)
        for workers in others:
            workers.kill()
        for thread in self._threads:
            thread.join(EXIT_S)

    def _listen(self) -> None:
        settings = self._own.settings
        try:
            wire = Wire(socket.create_connection(tuple(settings["server"]), CONNECT_S))
            tp = self._own.job.rollout.tensor_parallel_size
            own = {"gpus": own_gpus(tp), "rank_gpus": rank_gpus()}
            who = {"engine": settings["engine"], "host": socket.gethostname(), **own}
            wire.send({"type": RANK, "token": settings["token"], **who})
            self._wire = wire
            while not self._is_over.is_set():
                self._handle(wire.receive()[0])
        except (OSError, WireClosed):
            self._is_lost.set()

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message.get("type")
        if kind == "over":
            self._is_over.set()
            return
        number = int(message["engine"])
        if kind == "start":
            self._start(number, [str(gpu) for gpu in message["gpus"]])
        elif (workers := self._workers.get(number)) is not None:
            if kind == "leave":
                workers.leave()
            elif kind == "kill":
                workers.kill()

    def _start(self, number: int, gpus: list[str]) -> None:
        settings = {**self._own.settings, "engine": number}
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "LOCAL_RANK": "0"} if gpus else {}
        workers = EngineWorkers(self._own.job, settings, environment, keep_alive=lambda: None)
        self._workers[number] = workers
        thread = threading.Thread(
            target=self._keep, args=(number, workers), name=f"mrl-engine-{number}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _keep(self, number: int, workers: EngineWorkers) -> None:
        """Run a worker of a further engine, and start another one whenever a worker is lost that had
        joined. If the first one does not join, the engine cannot start, and the run goes on."""
        why = ""
        try:
            why = self._run(number, workers)
        except Exception as error:  # for instance too many processes
            why = f"{type(error).__name__}: {error}"
        finally:
            self.report_end(number, why)

    def _run(self, number: int, workers: EngineWorkers) -> str:
        """Run the workers of an engine. Return why it could not start; empty otherwise."""
        num_failed, is_first = 0, True
        while not workers.is_leaving:
            code, has_joined = workers.run_one()
            is_over = code == ExitCode.DONE or not answers(workers.settings["server"])
            if workers.is_leaving or is_over:
                break
            how = how_it_ended(code)
            if is_first and not has_joined:
                return f"its worker {how} before it joined; see the messages of the job"
            is_first, num_failed = False, 0 if has_joined else num_failed + 1
            if num_failed > workers.job.rollout.max_restarts:
                workers.report_gone(num_failed, how)
                break
            console.warning(f"rollout engine {number}: its worker {how}; starting another one")
        return ""


def own_gpus(num: int) -> list[str]:
    """Return the ids of this rank's GPU and of the GPUs after it, `num` in total; empty on CPUs."""
    if not torch.cuda.is_available():
        return []  # without the imports
    from mrl.engine_pool.engine_nodes import gpu_ids
    from parallel.mesh import local_device

    return gpu_ids(local_device(), num)


def rank_gpus() -> list[str]:
    """Return the ids of the GPUs that the ranks on this machine use; empty on CPUs."""
    if not torch.cuda.is_available():
        return []
    from mrl.engine_pool.engine_nodes import gpu_ids

    num = min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
    return gpu_ids(torch.device("cuda", 0), num)
