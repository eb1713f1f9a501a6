"""Run episodes in worker processes, so that a run survives environments that raise, hang or die.

An episode whose environment fails is over and has no reward. If an episode kills its worker
process, the other episodes of that process are replayed in a new process, which receives the same
actions again. An episode that gives other answers when it is replayed fails, too.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from functools import partial

from mrl.config import EnvironmentConfig
from mrl.environments.base import RESERVED_COLUMNS, Observation, StepResult
from mrl.environments.calls import Reply
from mrl.environments.episode_worker import EpisodeWorker
from mrl.environments.episodes import EpisodeFailed, Start
from mrl.errors import InputError, RunFailed
from mrl.rewards.budget import Budget
from mrl.rewards.runner import check_failures
from mrl.system.processes import Closing
from mrl.system.worker_process import WorkerProcess
from mrl.system.worker_user import WorkerUser
from mrl.types import Prompt

CLOSE_LIMIT_S = 5.0
"""The time limit for the close() calls of all remaining episodes at the end of the run."""

OnBegun = Callable[[Observation | EpisodeFailed | RunFailed | None], None]
OnStep = Callable[[StepResult | EpisodeFailed | RunFailed], None]
"""Both take an answer, or the error that ends the run. They are called in another thread, and must
return at once."""


class EnvironmentRunner(Closing):
    """Runs episodes in `config.num_workers` processes. Each episode advances on its own.

    An episode runs in the process that has the fewest unanswered requests and, among equals, the fewest
    episodes when it begins; processes that one call has occupied for a while come last. Thread-safe.
    Raises InputError if the environment cannot be loaded.
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
        self.what = f"environment {config.label}"
        """The environment's name, for messages."""
        self.num_failed = 0
        """The number of episodes that have failed since the last `reset_counts`."""
        self.first_error = ""
        self._replayed_before = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._places: dict[int, int] = {}
        """The index of the worker of each episode that is not ended."""
        self._asked: set[int] = set()
        """The episodes with an unanswered request."""
        self._num_waiting = [0] * config.num_workers
        """The number of unanswered requests of each worker."""
        self._num_episodes = [0] * config.num_workers
        self._workers = [self._worker(budget, user) for _ in range(config.num_workers)]
        try:
            for worker in self._workers:
                worker.started.result()
        except BaseException:
            self.close()
            raise

    def _worker(self, budget: Budget, user: WorkerUser | None) -> EpisodeWorker:
        config = self.config
        assert config.name is not None
        arguments = (config.name, json.dumps(config.arguments))
        process = WorkerProcess("mrl.environments.worker", self.what, *arguments, user=user)
        return EpisodeWorker(process, self.what, config.time_limit_s, budget)

    @property
    def num_replayed(self) -> int:
        """The number of episodes that were replayed since the last `reset_counts`.

        An episode is replayed if its process was lost.
        """
        return sum(worker.num_replayed for worker in self._workers) - self._replayed_before

    def reset_counts(self) -> None:
        """Set the numbers of failed and replayed episodes to 0."""
        with self._lock:
            self.num_failed, self.first_error = 0, ""
            self._replayed_before += self.num_replayed

    def begin(self, start: Start, on_begun: OnBegun) -> int:
        """Begin an episode, and return its number. `on_begun` gets the first observation, None if the
        episode begins without an observation, or EpisodeFailed."""
        with self._lock:
            number = next(self._numbers)
            place = min(range(len(self._workers)), key=self._load)
            self._places[number] = place
            self._num_episodes[place] += 1
            self._note_asked(number)
        request = {
            "reset": number,
            "prompt": start.prompt.content,
            "seed": start.seed,
            "columns": start.prompt.columns,
        }
        on_reply = partial(self._answer, number, lambda reply: on_begun(_observation(reply)))
        self._workers[place].begin(number, request, on_reply)
        return number

    def step(self, number: int, action: str, on_step: OnStep) -> None:
        """Pass the policy's text to an episode that has answered; `on_step` gets the result."""
        with self._lock:
            place = self._places[number]
            self._note_asked(number)
        on_reply = partial(self._answer, number, lambda reply: on_step(_result(reply)))
        self._workers[place].ask(number, {"step": number, "action": action}, on_reply)

    def end(self, number: int, on_end: Callable[[], None] = lambda: None) -> None:
        """End an episode that is done, has failed or is not needed any more, and close its environment.

        `on_end` is called in another thread when the environment is closed. A request that is
        unanswered gets no answer.
        """
        with self._lock:
            self._note_answered(number)
            place = self._places.pop(number)

        def note_end() -> None:
            with self._lock:
                self._num_episodes[place] -= 1
            on_end()

        self._workers[place].end(number, note_end)

    def count_failure(self, reason: str, step_samples: int) -> None:
        """Count one more failed episode. Raises RunFailed if more than 5% of `step_samples` have
        failed."""
        with self._lock:
            self.num_failed += 1
            self.first_error = self.first_error or reason
            check_failures(self.what, self.num_failed, step_samples, self.first_error)

    def close(self) -> None:
        """Close the remaining environments within CLOSE_LIMIT_S, and end all processes.

        May be called more than once.
        """
        deadline = time.monotonic() + CLOSE_LIMIT_S
        for worker in self._workers:
            worker.finish(CLOSE_LIMIT_S)
        for worker in self._workers:
            worker.join(max(deadline - time.monotonic(), 0.0))
        for worker in self._workers:
            worker.kill()

    def _answer(
        self, number: int, on_reply: Callable[[Reply | RunFailed], None], reply: Reply | RunFailed
    ) -> None:
        with self._lock:
            self._note_answered(number)
        on_reply(reply)

    def _load(self, place: int) -> tuple[bool, int, int]:
        return self._workers[place].is_held, self._num_waiting[place], self._num_episodes[place]

    def _note_asked(self, number: int) -> None:
        self._asked.add(number)
        self._num_waiting[self._places[number]] += 1

    def _note_answered(self, number: int) -> None:
        if number in self._asked:
            self._asked.remove(number)
            self._num_waiting[self._places[number]] -= 1


def _observation(reply: Reply | RunFailed) -> Observation | EpisodeFailed | RunFailed | None:
    if isinstance(reply, RunFailed):
        return reply
    return EpisodeFailed(reply["error"]) if "error" in reply else reply["observation"]


def _result(reply: Reply | RunFailed) -> StepResult | EpisodeFailed | RunFailed:
    if isinstance(reply, RunFailed):
        return reply
    return EpisodeFailed(reply["error"]) if "error" in reply else StepResult(**reply)


def check_columns(prompt: Prompt) -> None:
    """Raise InputError if a column of the row has the name of an argument of reset()."""
    clash = [name for name in RESERVED_COLUMNS if name in prompt.columns]
    if clash:
        raise InputError(
            f"{prompt.source}: column {clash[0]!r} is the name of an argument of the "
            "environment's reset(); rename it"
        )
