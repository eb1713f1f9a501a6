"""The episodes of one engine's part of a step: each advances on its own, and none waits for another.

Threads that wait for the engine, for environments or for agents put events into one queue. The
rollout's thread takes them, and does with each what makes its episode advance. Groups are yielded in
the order in which they are complete.

Dimensions: G samples per prompt.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from mrl.algorithms.episodes import of_samples
from mrl.collect.endpoint.generation import Generation
from mrl.engines.base import EngineLost, PolicyEndpoint
from mrl.system.heartbeat import beat, expect_samples, finish_samples
from mrl.types import Prompt, Sample, SampleGroup

POLL_S = 0.2
"""Seconds between two looks at whether the engine was lost."""


class Counting(Protocol):
    """Runs the episodes of all groups, and counts those that fail."""

    def count_failure(self, reason: str, step_samples: int) -> None:
        """Count a failed episode. Raises RunFailed if more than 5% of `step_samples` have failed."""
        ...


Runner = TypeVar("Runner", bound=Counting)


@dataclass
class GroupEpisodes(Generic[Runner]):
    """Counts the failed episodes of some groups on their own, on top of the counts of `runner`, which
    runs the episodes of these and other groups."""

    runner: Runner
    num_failed: int = 0

    def count_failure(self, reason: str, step_samples: int) -> None:
        """Count a failed episode, both here and in the runner. See `Counting`."""
        self.num_failed += 1
        self.runner.count_failure(reason, step_samples)


class Episode(Protocol):
    """An episode of a rollout."""

    @property
    def prompt(self) -> Prompt: ...

    def samples(self, weight_version: int) -> list[Sample]:
        """Return the samples of an episode that has ended: its branches, or a single one.

        `weight_version` is for a sample without tokens of the policy.
        """
        ...


class Player(Protocol):
    """Lets the episodes of a rollout advance. The rollout's thread calls its methods."""

    def begin(self) -> None:
        """Begin all episodes."""
        ...

    def resume(self) -> None:
        """Go on: there is an engine now, the first one or the next one after a loss."""
        ...

    def pause(self) -> None:
        """Take note that the engine was lost, and that episodes wait for the next one."""
        ...

    def advance(self) -> float:
        """Send what is ready. This is called whenever events were taken from the queue, and after the
        returned number of seconds at the latest."""
        ...

    def stop(self) -> None:
        """End what is still running, because no group waits for it any more."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether an episode that is over still has to be cleaned up, which puts an event."""
        ...


class EpisodeLoop:
    """Takes the events of a rollout, and makes groups of the episodes that have ended."""

    def __init__(
        self,
        groups: Sequence[Sequence[Episode]],
        player: Player,
        generation: Generation,
        *,
        is_tree: bool = False,
        complete: Callable[[SampleGroup, Sequence[Any]], SampleGroup] | None = None,
    ) -> None:
        """`groups` has the G episodes of each group. `generation` is opened for each engine, and closed
        when the rollout is over. `is_tree`: whether episodes may have several samples. `complete` is
        given a group and its episodes, and returns the group with what else is known of it."""
        self._groups, self._player, self._generation = groups, player, generation
        self._is_tree, self._completed = is_tree, complete
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._place = {id(episode): g for g, group in enumerate(groups) for episode in group}
        self._rewards: dict[int, float] = {}
        """The reward of each episode that has ended, by its identity."""
        self._num_left = [len(group) for group in groups]
        """The number of episodes of each group that have not ended."""
        self._complete: deque[int] = deque()
        """The complete groups that have not been yielded yet."""
        self._num_yielded = 0
        self._has_begun = False
        self._version: int | None = None
        """The newest weight version that the engine is known to have had."""
        expect_samples(len(self._place))

    @property
    def is_over(self) -> bool:
        """Whether `finished` has yielded all groups."""
        return self._num_yielded == len(self._groups)

    def put(self, event: Callable[[], None]) -> None:
        """Let the rollout's thread call `event`. Any thread may call this. What `event` raises ends the
        rollout."""
        self._events.put(event)

    def end(self, episode: Episode, reward: float) -> None:
        """Record that an episode has ended. Its reward is NaN if it is masked."""
        self._rewards[id(episode)] = reward
        finish_samples()
        place = self._place[id(episode)]
        self._num_left[place] -= 1
        if not self._num_left[place]:
            self._complete.append(place)

    def finished(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        """Yield groups when they are complete, with rewards f32[G].

        Raises the errors of generate() and of events. After EngineLost, episodes wait for another call.
        """
        self._generation.open(endpoint)
        self._player.resume()
        waits_for_engine = False
        try:
            self._note_version(endpoint)
            if not self._has_begun:
                self._has_begun = True
                self._player.begin()
            while not self.is_over or self._player.is_ending:
                self._take_events(self._player.advance())
                self._note_version(endpoint)
                while self._complete:
                    yield self._group(self._complete.popleft())
        except EngineLost:
            waits_for_engine = True
            self._player.pause()
            raise
        finally:
            if not waits_for_engine:
                self._player.stop()
            self._generation.close(is_over=not waits_for_engine)

    def _take_events(self, wait_s: float) -> None:
        """Take the events that are there, or wait for one. Raises what ends the rollout."""
        beat()
        if self._generation.error is not None:
            raise self._generation.error
        if (lost := self._generation.lost) is not None:
            raise lost
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return
        event()
        for _ in range(self._events.qsize()):
            self._events.get_nowait()()

    def _note_version(self, endpoint: PolicyEndpoint) -> None:
        """Note the weight version. It is None while the weights change; before the first version is
        known, wait until they have."""
        while (version := endpoint.weight_version) is None and self._version is None:
            list(endpoint.generate([], concurrent=True))
        self._version = self._version if version is None else version

    def _group(self, place: int) -> SampleGroup:
        members = self._groups[place]
        assert self._version is not None
        samples = [episode.samples(self._version) for episode in members]
        episodes = tuple(e for e, branches in enumerate(samples) for _ in branches)
        rewards = torch.tensor([self._rewards[id(e)] for e in members], dtype=torch.float32)
        self._num_yielded += 1
        group = SampleGroup(
            members[0].prompt,
            [branch for branches in samples for branch in branches],
            rewards=of_samples(rewards, episodes),
            episodes=episodes if self._is_tree else None,
        )
        return group if self._completed is None else self._completed(group, members)
