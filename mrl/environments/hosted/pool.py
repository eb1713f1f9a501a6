"""The worker processes of a run's hosted environment, and the episodes that they play."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, as_completed, wait
from typing import Any

from mrl.config import EnvironmentConfig
from mrl.environments.command import LOOK_S, MARK, Guard, Outcome
from mrl.environments.hosted.spec import worker_command, worker_spec
from mrl.environments.hosted.worker import HostedWorker
from mrl.errors import InputError, RunFailed
from mrl.system.process_search import POLL_S, kill_by_variable
from mrl.system.processes import Closing

RETRY_S = 30.0
"""Seconds between two tries to replace a lost worker while other workers play."""


class EpisodeWorkers(Closing):
    """Plays episodes in `environment.num_workers` processes. It has the methods of `AgentCommand`.

    A worker that dies or hangs is replaced when the next episode begins; the episodes in it have
    failed. Other workers play meanwhile. Raises InputError if the environment cannot be loaded.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._limit_s = config.episode_limit_s
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._closed = threading.Event()
        self._choosing = threading.Lock()
        self._workers: list[HostedWorker] = []
        self._replacements: dict[int, Future[HostedWorker]] = {}
        """Workers that are being started for a place in `_workers`."""
        self._next_start: dict[int, float] = {}
        """When a place whose worker could not be replaced is tried again (`time.monotonic`)."""
        self._guard = Guard(self._mark)
        try:
            self._workers = self._start(config.num_workers)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        given: Mapping[str, Any],
        variables: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
        stop: threading.Event | None = None,
    ) -> Outcome:
        """Play one episode, and return when it has ended.

        The worker gets the row `given`, and address and key of the endpoint out of `variables`. The
        episode is cancelled when it has taken `environment.episode_limit_s` by the clock `now`, or when
        `stop` is set.
        """
        end = now() + self._limit_s
        try:
            worker = self._choose()
        except (InputError, RunFailed) as error:
            return Outcome(None, f"its worker could not be started again: {error}")
        number, pending = worker.play(
            {
                "given": given,
                "base_url": variables["OPENAI_BASE_URL"],
                "key": variables["OPENAI_API_KEY"],
                "model": variables["OPENAI_MODEL"],
            }
        )
        while not pending.ended.wait(LOOK_S):
            why = ""
            if (stop is not None and stop.is_set()) or self._closed.is_set():
                why = "the rollout is over"
            elif now() >= end:
                why = f"no end within environment.episode_limit_s={self._limit_s:g} s, cancelled"
            if why:
                worker.cancel(number)
                return Outcome(None, why)
        reply = pending.reply
        if "error" in reply:
            return Outcome(None, reply["error"])
        if reply["reward"] is None:  # a reward of the recipe judges the answer
            return Outcome(0.0, answer=reply["answer"] or "", parts=reply["parts"])
        return Outcome(reply["reward"], parts=reply["parts"])

    def sweep(self) -> None:
        """Kill workers in which cancelled episodes still run. No episode may be running."""
        with self._choosing:
            for worker in self._workers:
                if worker.has_left_overs():
                    worker.kill("its episode did not end when it was cancelled")

    def close(self) -> None:
        """Kill all workers, also those that are being started, and wait until they have ended. May be
        called more than once."""
        with self._choosing:  # afterwards, no further replacement begins
            self._closed.set()
            workers, replacements = list(self._workers), list(self._replacements.values())
        for worker in workers:
            worker.kill("the run is ending")
        while wait(replacements, POLL_S).not_done:
            kill_by_variable(MARK, self._mark)
        self._guard.close()

    def _choose(self) -> HostedWorker:
        """Return the worker with the fewest episodes, and begin to replace those that were lost. If all
        were lost, wait for a replacement; raises InputError or RunFailed if none can be started."""
        with self._choosing:
            alive = [worker for worker in self._workers if not worker.is_lost]
            if self._closed.is_set():
                return self._workers[0]
            for place, worker in enumerate(self._workers):
                waits = bool(alive) and time.monotonic() < self._next_start.get(place, 0.0)
                if worker.is_lost and place not in self._replacements and not waits:
                    self._replace(place)
            replacements = list(self._replacements.values())
        if alive:
            return min(alive, key=lambda worker: worker.num_playing)
        error: BaseException | None = None
        for replacement in as_completed(replacements):
            if (error := replacement.exception()) is None:
                return replacement.result()
        assert error is not None
        raise error

    def _replace(self, place: int) -> None:
        """Begin to start another worker for a place."""
        replacement = self._replacements[place] = Future()

        def start() -> None:
            try:
                worker = self._start_one()
            except BaseException as error:
                with self._choosing:
                    del self._replacements[place]
                    self._next_start[place] = time.monotonic() + RETRY_S
                if not self._closed.is_set():
                    what = f"environment {self._config.label}"
                    print(f"{what}: a lost worker was not replaced: {error}", file=sys.stderr)
                replacement.set_exception(error)
                return
            with self._choosing:
                del self._replacements[place]
                self._workers[place] = worker
            if self._closed.is_set():
                worker.kill("the run is ending")
            replacement.set_result(worker)

        threading.Thread(target=start, daemon=True).start()

    def _start(self, count: int) -> list[HostedWorker]:
        """Start workers, all at a time."""
        found: list[HostedWorker] = []
        errors: list[BaseException] = []

        def start() -> None:
            try:
                found.append(self._start_one())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=start) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            for worker in found:
                worker.kill("the run is ending")
            raise errors[0]
        return found

    def _start_one(self) -> HostedWorker:
        direct = {name: direct_hosts(name) for name in ("NO_PROXY", "no_proxy")}
        return HostedWorker(
            f"environment {self._config.label}",
            worker_command(self._config),
            worker_spec(self._config),
            direct,
            self._mark,
            self._config.time_limit_s,
        )


def direct_hosts(name: str) -> str:
    """Return the value for the environment variable `name` with which this machine's loopback is
    reached without a proxy, which could not reach it."""
    return ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
