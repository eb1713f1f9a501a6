"""Rollouts of agents: every episode advances on its own, and no episode waits for another.

Dimensions: G samples per prompt.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mrl.algorithms.episodes import of_samples
from mrl.collect.endpoint.generation import Generation
from mrl.collect.endpoint.record import EpisodeRecord
from mrl.engines.base import EngineLost, PolicyEndpoint, sample_seed
from mrl.engines.sampling import SamplingParams
from mrl.environments.command import Outcome
from mrl.system.heartbeat import beat
from mrl.types import Prompt, Sample, SampleGroup

if TYPE_CHECKING:  # it imports a web server, which few runs need
    from mrl.collect.endpoint.agents import Agents

POLL_S = 0.2
NO_REQUEST = "it printed a reward, but asked the policy for nothing that could be trained"


@dataclass
class GroupAgents:
    """Counts the failures of some groups on their own, on top of the run's `Agents`."""

    agents: Agents
    num_failed: int = 0

    def count_failure(self, reason: str, step_samples: int) -> None:
        self.num_failed += 1
        self.agents.count_failure(reason, step_samples)


class PausableTime:
    """Seconds that stand still while it is paused. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused_s = 0.0
        self._paused_at: float | None = None

    def now(self) -> float:
        with self._lock:
            at = time.monotonic() if self._paused_at is None else self._paused_at
            return at - self._paused_s

    def pause(self) -> None:
        with self._lock:
            self._paused_at = time.monotonic() if self._paused_at is None else self._paused_at

    def resume(self) -> None:
        with self._lock:
            if self._paused_at is not None:
                self._paused_s += time.monotonic() - self._paused_at
                self._paused_at = None


@dataclass
class _Episode:
    prompt: Prompt
    environment_seed: int
    record: EpisodeRecord
    reward: float | None = None
    """The episode's reward, NaN if it is masked; None while it is running."""

    @property
    def given(self) -> dict[str, Any]:
        """What the agent reads: the row, and the seed of what is random in its task."""
        row = {"prompt": self.prompt.content, **self.prompt.columns}
        return {**row, "seed": self.environment_seed}

    def samples(self, weight_version: int, *, is_tree: bool) -> list[Sample]:
        assert self.reward is not None
        is_masked = math.isnan(self.reward)
        return self.record.samples(weight_version, is_masked=is_masked, is_tree=is_tree)


class AgentRollout:
    """Generates the episodes of one engine's part of a step. It is a `mrl.collect.task.Rollout`."""

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        agents: GroupAgents,
        *,
        sampling: SamplingParams,
        context_len: int,
        seeds: Sequence[int],
        step_samples: int,
        is_tree: bool = False,
        options: Mapping[str, bool] = {},
    ) -> None:
        """`is_tree`: whether all branches of an episode become samples, instead of the longest. The
        other arguments are those of `MultiTurnRollout`, and the seeds of samples and environments are
        the same, too."""
        self._is_tree = is_tree
        self._agents, self._step_samples = agents, step_samples
        self._generation = Generation(options)
        self._time = PausableTime()
        self._stop = threading.Event()
        self._ended: queue.SimpleQueue[tuple[_Episode, Outcome | Exception]] = queue.SimpleQueue()
        self._has_started = False
        self._waiting = [
            [
                _Episode(
                    group.prompt,
                    sample_seed(seed, f"environment/{group.prompt.prompt_id}", 0),
                    EpisodeRecord(
                        group.prompt,
                        sample.group_id,
                        f"{group.prompt.source} group {sample.group_id} sample {k}",
                        sample_seed(seed, group.prompt.prompt_id, k),
                        agents.agents.texts,
                        self._generation,
                        sampling=sampling,
                        context_len=context_len,
                        max_turns=agents.agents.config.max_turns,
                    ),
                )
                for k, sample in enumerate(group.samples)
            ]
            for group, seed in zip(groups, seeds, strict=True)
        ]
        """The episodes of each group that has not been yielded yet."""

    @property
    def partial(self) -> list[SampleGroup]:
        """An empty list, because an agent's process is not kept for a later step."""
        return []

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded all groups."""
        return not self._waiting

    def finished(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        """Yield groups when they are complete, with rewards f32[G]. A reward is NaN if the agent
        failed, took too long, or was cut off.

        Raises the errors of generate(), and RunFailed if agents fail too often. After EngineLost, the
        agents wait for another call, and their time stands still.
        """
        self._generation.open(endpoint)
        self._time.resume()
        waits_for_engine = False
        try:
            self._start()
            yield from self._whole_groups(endpoint)
            while self._waiting:
                self._take_next()
                yield from self._whole_groups(endpoint)
        except EngineLost:
            waits_for_engine = True
            self._time.pause()
            raise
        finally:
            if not waits_for_engine:
                self._stop.set()
            self._generation.close(is_over=not waits_for_engine)

    def _start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        for episode in (each for group in self._waiting for each in group):
            on_end = partial(self._end, episode)
            self._agents.agents.submit(
                episode.record, episode.given, self._time.now, self._stop, on_end
            )

    def _end(self, episode: _Episode, outcome: Outcome | Exception) -> None:
        self._ended.put((episode, outcome))

    def _take_next(self) -> None:
        """Wait a moment for an episode to end, and note how it ended. Raises what ends the rollout."""
        beat()
        if self._generation.error is not None:
            raise self._generation.error
        if (lost := self._generation.lost) is not None:
            raise lost
        try:
            episode, outcome = self._ended.get(timeout=POLL_S)
        except queue.Empty:
            return
        if isinstance(outcome, Exception):
            raise outcome
        episode.reward = self._scored(episode, outcome)

    def _scored(self, episode: _Episode, outcome: Outcome) -> float:
        """Return the reward of an episode; NaN if it is masked."""
        cut_off = episode.record.cut_off
        if outcome.reward is not None and (leaves := episode.record.leaves):
            if len(leaves) > 1 and not self._is_tree:
                self._agents.agents.count_branched()
            return outcome.reward
        if cut_off:
            self._agents.agents.count_cut_off(cut_off)
        else:
            why = outcome.error if outcome.reward is None else NO_REQUEST
            self._agents.count_failure(f"{episode.prompt.source}: {why}", self._step_samples)
        return math.nan

    def _whole_groups(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        for members in list(self._waiting):
            rewards = [episode.reward for episode in members]
            known = [reward for reward in rewards if reward is not None]
            if len(known) < len(members):
                continue
            version = endpoint.weight_version
            assert version is not None
            self._waiting = [each for each in self._waiting if each is not members]
            samples = [episode.samples(version, is_tree=self._is_tree) for episode in members]
            episodes = tuple(e for e, branches in enumerate(samples) for _ in branches)
            rewards = torch.tensor(known, dtype=torch.float32)
            yield SampleGroup(
                members[0].prompt,
                [branch for branches in samples for branch in branches],
                rewards=of_samples(rewards, episodes),
                episodes=episodes if self._is_tree else None,
            )
