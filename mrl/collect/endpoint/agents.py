"""The agents of a run, which talk to the policy at the endpoint: programs, or hosted environments."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from mrl.collect.endpoint.answers import MODEL
from mrl.collect.endpoint.record import EpisodeRecord
from mrl.collect.endpoint.server import EndpointServer
from mrl.collect.endpoint.texts import Texts
from mrl.config import EnvironmentConfig
from mrl.environments.command import AgentCommand, Outcome
from mrl.environments.hosted.pool import EpisodeWorkers
from mrl.rewards.runner import check_failures
from mrl.system.processes import Closing


class Agents(Closing):
    """Runs agents, at most `environment.num_agents` at a time, and serves the policy to them.

    Raises InputError if their program cannot be found, or if a hosted environment cannot be loaded.
    """

    num_replayed = 0
    """Number of episodes that were replayed: 0, because agents cannot be replayed."""

    def __init__(
        self, config: EnvironmentConfig, tokenizer: Any, template_kwargs: dict[str, Any]
    ) -> None:
        self.config, self.what = config, f"environment {config.label}"
        self.texts = Texts(tokenizer, template_kwargs)
        self.num_failed = self.num_cut_off = 0
        """Episodes since `reset_counts` that failed, and those that ended because the context or the
        number of turns was used up. Both are masked."""
        self.first_error = self.first_cut_off = ""
        self._num_branched, self._has_warned = 0, False
        self._counting = threading.Lock()
        with ExitStack() as undo:
            runs = EpisodeWorkers(config) if config.is_hosted else AgentCommand(config)
            self._command = undo.enter_context(runs)
            self._server = undo.enter_context(EndpointServer())
            self._threads = ThreadPoolExecutor(config.num_agents, thread_name_prefix="mrl-agent")
            self._undo = undo.pop_all()

    def reset_counts(self) -> None:
        """Set the counts of failures and cut-offs to 0."""
        with self._counting:
            self.num_failed = self.num_cut_off = 0
            self.first_error = self.first_cut_off = ""

    def count_failure(self, reason: str, step_samples: int) -> None:
        """Count a failed episode. Raises RunFailed if more than 5% of `step_samples` have failed."""
        with self._counting:
            self.num_failed += 1
            self.first_error = self.first_error or reason
            check_failures(self.what, self.num_failed, step_samples, self.first_error)

    def count_cut_off(self, reason: str) -> None:
        """Count an episode that was cut off."""
        with self._counting:
            self.num_cut_off += 1
            self.first_cut_off = self.first_cut_off or reason

    def count_branched(self) -> None:
        """Count an episode with several branches, of which only the longest is trained."""
        with self._counting:
            self._num_branched += 1

    def take_branched(self) -> int:
        """Return the number of episodes with several branches, but 0 once it has returned another
        number, because one warning is enough."""
        with self._counting:
            found = 0 if self._has_warned else self._num_branched
            self._has_warned |= bool(found)
            return found

    def submit(
        self,
        record: EpisodeRecord,
        given: dict[str, Any],
        now: Callable[[], float],
        stop: threading.Event,
        on_end: Callable[[Outcome | Exception], None],
    ) -> None:
        """Run an episode in a thread as soon as there is a free one, and call `on_end` in that thread.

        The agent reads `given`. Its time is measured by `now`, and it is killed when `stop` is set.
        """

        def play() -> None:
            try:
                on_end(self._play(record, given, now, stop))
            except Exception as error:
                on_end(error)

        self._threads.submit(play)

    def _play(
        self,
        record: EpisodeRecord,
        given: dict[str, Any],
        now: Callable[[], float],
        stop: threading.Event,
    ) -> Outcome:
        if stop.is_set():
            return Outcome(None, "the rollout is over")
        key = secrets.token_urlsafe(32)
        self._server.app.add(key, record)
        try:
            return self._command.run(given, self._variables(key), now, stop)
        finally:
            self._server.app.remove(key)
            record.end()

    def _variables(self, key: str) -> dict[str, str]:
        direct = {}  # a proxy of the machine cannot reach its loopback
        for name in ("NO_PROXY", "no_proxy"):
            given = [each for each in (os.environ.get(name), "127.0.0.1,localhost") if each]
            direct[name] = ",".join(given)
        return {
            "OPENAI_BASE_URL": self._server.address,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": MODEL,
            **direct,
        }

    def sweep(self) -> None:
        """Kill what ended episodes have left running. Call it only while no episode runs."""
        self._command.sweep()

    def close(self) -> None:
        """Kill all agents and stop serving. May be called more than once."""
        self._command.close()
        self._threads.shutdown(cancel_futures=True)
        self._undo.close()
