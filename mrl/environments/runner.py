"""Run episodes in worker processes, so that a run survives environments that raise, hang or die.

An episode whose environment fails is over and has no reward. If an episode kills its worker
process, the other episodes of that process are replayed in a new process, which receives the same
actions again. An episode that gives other answers when it is replayed fails, too.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from mrl.config import EnvironmentConfig
from mrl.environments.base import RESERVED_COLUMNS, Observation, StepResult
from mrl.environments.episodes import EpisodeFailed, Start
from mrl.errors import InputError
from mrl.rewards.budget import Budget
from mrl.rewards.runner import check_failures
from mrl.system.json_worker import JsonWorker, WorkerLost, WorkerNotStarted
from mrl.system.processes import Closing
from mrl.system.worker_user import WorkerUser
from mrl.types import Prompt

CLOSE_LIMIT_S = 5.0
"""The time limit for the close() calls of all remaining episodes at the end of the run."""


@dataclass
class _Episode:
    process: int
    """The number of the process in which the episode runs (see `_Worker._number`)."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)


class _Worker:
    """Runs some of the episodes in one process, and starts a new process if that process is lost."""

    def __init__(self, config: EnvironmentConfig, budget: Budget, user: WorkerUser | None) -> None:
        self._time_limit_s, self._budget = config.time_limit_s, budget
        assert config.name is not None
        self._what = f"environment {config.name!r}"
        self._process = JsonWorker(
            "mrl.environments.worker",
            self._what,
            config.name,
            json.dumps(config.arguments),
            user=user,
        )
        self._number = 0
        """How many processes this worker has lost so far. The number also identifies the current
        process."""
        self._episodes: dict[int, _Episode] = {}
        self._not_started = ""
        """Why the start of a new process failed in this turn; empty if no start has failed. A start
        is tried only once per turn."""
        self.num_replayed = 0

    def start(self) -> None:
        self._process.start()

    def play(self, requests: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Send each request to its episode, and return the replies.

        Requests and replies are keyed by episode number. The reply of an episode that has failed is
        `{"error": reason}`.
        """
        self._not_started = ""
        return {number: self._ask(number, request) for number, request in requests.items()}

    def end(self, numbers: Collection[int] | None = None, limit_s: float | None = None) -> None:
        """Close and forget the episodes `numbers` (None: all), within `limit_s` seconds.

        By default, `limit_s` is `config.time_limit_s` times the number of episodes to close. If the
        time is up, the process is killed. Episodes that this worker does not have are ignored.
        """
        chosen = list(self._episodes) if numbers is None else numbers
        ended = {n: self._episodes.pop(n) for n in chosen if n in self._episodes}
        live = [n for n, episode in ended.items() if episode.process == self._number]
        if not live:
            return
        try:
            self._process.call({"end": live}, limit_s or self._time_limit_s * len(live))
        except WorkerLost as error:
            self._number += 1
            print(f"{self._what}: close() of {len(live)} episodes: {error}", file=sys.stderr)

    def close(self) -> None:
        self._process.close()

    def _ask(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        episode = self._episodes.setdefault(number, _Episode(self._number))
        reply: dict[str, Any] = {}
        if episode.process != self._number:
            reply = self._replay(number, episode)
        if "error" not in reply:
            reply = self._call(request)
            episode.requests.append(request)
            episode.replies.append(reply)
        if "error" in reply or reply.get("done"):
            self._episodes.pop(number, None)
        return reply

    def _replay(self, number: int, episode: _Episode) -> dict[str, Any]:
        """Replay an episode of a lost process up to its last action.

        Returns {}, or `{"error": reason}` if the episode fails or gives other answers than before.
        """
        self.num_replayed += 1
        episode.process = self._number
        for request, before in zip(episode.requests, episode.replies, strict=True):
            now = self._call(request)
            if "error" in now:
                return now
            if now != before:
                self.end([number])  # its instance still exists in the new process
                return {"error": "another episode killed its process, and its answers differed when it "
                        "was replayed: an environment must be determined by its seed"}  # fmt: skip
        return {}

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._not_started:  # tried once per turn, because an import may be slow
            return {"error": self._not_started}
        try:
            with self._budget.spending(self._time_limit_s) as limit_s:
                return self._process.call(request, limit_s)
        except WorkerLost as error:
            self._number += 1
            if isinstance(error, WorkerNotStarted):
                self._not_started = str(error)
            return {"error": str(error)}


class EnvironmentRunner(Closing):
    """Runs episodes in `config.num_workers` processes; episode n runs in process `n % num_workers`.

    The class implements `Episodes`. Raises InputError if the environment cannot be loaded.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        budget: Budget | None = None,
        user: WorkerUser | None = None,
    ) -> None:
        """Start the workers.

        The time limit for an answer is `config.time_limit_s`, or what is left of `budget` if that
        is less. The workers run as `user`, or as this process's user if `user` is None.
        """
        self.config, budget = config, budget or Budget()
        self.what = f"environment {config.name!r}"
        """The environment's name, for messages."""
        self._workers = [_Worker(config, budget, user) for _ in range(config.num_workers)]
        # A worker is killed when the thread that started it ends, so each has a thread that lives as
        # long as the runner.
        self._threads = [ThreadPoolExecutor(max_workers=1) for _ in self._workers]
        self._closed = False
        self.num_failed = 0
        """The number of episodes that have failed since the last `reset` or `reset_counts`."""
        self.first_error = ""
        self._step_samples = 0
        self._replayed_before = 0
        self._counting = threading.Lock()
        self._free_numbers = itertools.count()
        try:
            self._on_all(_Worker.start)
        except BaseException:
            self.close()
            raise

    @property
    def num_replayed(self) -> int:
        """The number of episodes that were replayed since the last `reset` or `reset_counts`.

        An episode is replayed if its process was lost.
        """
        return sum(worker.num_replayed for worker in self._workers) - self._replayed_before

    def reset(
        self, starts: Mapping[int, Start], *, step_samples: int
    ) -> dict[int, Observation | EpisodeFailed | None]:
        """Begin the episodes `starts`, and forget earlier episodes and their counts. See `Episodes`."""
        self._on_all(_Worker.end)
        self.reset_counts()
        return self.begin(starts, step_samples=step_samples)

    def reset_counts(self) -> None:
        """Set the numbers of failed and replayed episodes to 0."""
        self.num_failed, self.first_error = 0, ""
        self._replayed_before += self.num_replayed

    def begin(
        self, starts: Mapping[int, Start], *, step_samples: int
    ) -> dict[int, Observation | EpisodeFailed | None]:
        """Begin the episodes `starts` in addition to running episodes. Thread-safe."""
        self._step_samples = step_samples
        requests = {
            number: {
                "reset": number,
                "prompt": start.prompt.content,
                "seed": start.seed,
                "columns": start.prompt.columns,
            }
            for number, start in starts.items()
        }
        return {
            number: reply if isinstance(reply, EpisodeFailed) else reply["observation"]
            for number, reply in self._play(requests).items()
        }

    def step(self, actions: Mapping[int, str]) -> dict[int, StepResult | EpisodeFailed]:
        """Pass the policy's text to each episode in `actions`. Thread-safe. See `Episodes`."""
        replies = self._play({n: {"step": n, "action": text} for n, text in actions.items()})
        return {
            number: reply if isinstance(reply, EpisodeFailed) else StepResult(**reply)
            for number, reply in replies.items()
        }

    def end(self, numbers: Collection[int]) -> None:
        """End the episodes `numbers`. See `Episodes`."""
        self._on_all(lambda worker: worker.end(numbers))

    def count_failure(self, reason: str) -> None:
        """Count one more failed episode. See `Episodes`."""
        with self._counting:
            self.num_failed += 1
            self.first_error = self.first_error or reason
            check_failures(self.what, self.num_failed, self._step_samples, self.first_error)

    def new_numbers(self, wanted: Iterable[int]) -> dict[int, int]:
        """Map each number in `wanted` to an episode number that this runner has not used yet."""
        with self._counting:
            return {number: next(self._free_numbers) for number in wanted}

    def close(self) -> None:
        """Close the remaining environments within CLOSE_LIMIT_S, and end all processes.

        May be called more than once.
        """
        if not self._closed:
            self._closed = True
            pairs = zip(self._workers, self._threads, strict=True)
            ends = [t.submit(worker.end, limit_s=CLOSE_LIMIT_S) for worker, t in pairs]
            wait(ends, timeout=CLOSE_LIMIT_S)
        for worker, thread in zip(self._workers, self._threads, strict=True):
            worker.close()  # before the shutdown, because it ends a waiting call
            thread.shutdown(cancel_futures=True)

    def _on_all(self, action: Callable[[_Worker], None]) -> None:
        pairs = zip(self._workers, self._threads, strict=True)
        waiting = [thread.submit(action, worker) for worker, thread in pairs]
        for future in waiting:
            future.result()

    def _play(self, requests: dict[int, dict[str, Any]]) -> dict[int, Any]:
        count = len(self._workers)
        waiting = [
            thread.submit(
                worker.play, {n: request for n, request in requests.items() if n % count == place}
            )
            for place, (worker, thread) in enumerate(zip(self._workers, self._threads, strict=True))
        ]
        replies = {n: reply for future in waiting for n, reply in future.result().items()}
        return {n: self._checked(replies[n]) for n in requests}

    def _checked(self, reply: dict[str, Any]) -> dict[str, Any] | EpisodeFailed:
        if "error" not in reply:
            return reply
        self.count_failure(reply["error"])
        return EpisodeFailed(reply["error"])


def check_columns(prompt: Prompt) -> None:
    """Raise InputError if a column of the row has the name of an argument of reset()."""
    clash = [name for name in RESERVED_COLUMNS if name in prompt.columns]
    if clash:
        raise InputError(
            f"{prompt.source}: column {clash[0]!r} is the name of an argument of the "
            "environment's reset(); rename it"
        )
