"""Rollouts of agents, which are programs that ask the policy over HTTP.

Dimensions: G samples per prompt.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mrl.collect.endpoint.generation import Generation
from mrl.collect.endpoint.record import EpisodeRecord
from mrl.collect.episode_loop import POLL_S, EpisodeLoop, GroupEpisodes
from mrl.engines.base import PolicyEndpoint, sample_seed
from mrl.engines.sampling import SamplingParams
from mrl.environments.command import Outcome
from mrl.types import Prompt, Sample, SampleGroup

if TYPE_CHECKING:  # it imports a web server, which few runs need
    from mrl.collect.endpoint.agents import Agents

PLAYING = Outcome(None, "it has not ended")
NO_REQUEST = "it printed a reward, but asked the policy for nothing that could be trained"


@dataclass
class GroupAgents(GroupEpisodes[Any]):
    """The agents of some groups, while other groups use the same `Agents`."""

    runner: Agents


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


@dataclass(eq=False)
class _Episode:
    prompt: Prompt
    environment_seed: int
    record: EpisodeRecord
    is_tree: bool
    is_masked: bool = False
    outcome: Outcome = PLAYING

    @property
    def given(self) -> dict[str, Any]:
        """What the agent reads: the row, and the seed of what is random in its task."""
        row = {"prompt": self.prompt.content, **self.prompt.columns}
        return {**row, "seed": self.environment_seed}

    def samples(self, weight_version: int) -> list[Sample]:
        return self.record.samples(weight_version, is_masked=self.is_masked, is_tree=self.is_tree)


class AgentRollout:
    """Generates the episodes of one engine's part of a step. It is a `mrl.collect.task.Rollout`, and
    the `Player` of its episodes."""

    is_ending = False

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
        self._agents, self._step_samples = agents, step_samples
        self._time = PausableTime()
        self._stop = threading.Event()
        generation = Generation(options)
        self._groups = [
            [
                _Episode(
                    group.prompt,
                    sample_seed(seed, f"environment/{group.prompt.prompt_id}", 0),
                    EpisodeRecord(
                        group.prompt,
                        sample.group_id,
                        f"{group.prompt.source} group {sample.group_id} sample {k}",
                        sample_seed(seed, group.prompt.prompt_id, k),
                        agents.runner.texts,
                        generation,
                        sampling=sampling,
                        context_len=context_len,
                        max_turns=agents.runner.config.max_turns,
                    ),
                    is_tree,
                )
                for k, sample in enumerate(group.samples)
            ]
            for group, seed in zip(groups, seeds, strict=True)
        ]
        self._loop = EpisodeLoop(
            self._groups, self, generation, is_tree=is_tree, complete=self._with_outcomes
        )

    @property
    def partial(self) -> list[SampleGroup]:
        """An empty list, because an agent's process is not kept for a later step."""
        return []

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded all groups."""
        return self._loop.is_over

    def finished(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        """Yield groups when they are complete, with rewards f32[G]. A reward is NaN if the agent
        failed, took too long, or was cut off.

        Raises the errors of generate(), and RunFailed if agents fail too often. After EngineLost, the
        agents wait for another call, and their time stands still.
        """
        return self._loop.finished(endpoint)

    def begin(self) -> None:
        for episode in (each for group in self._groups for each in group):
            on_end = partial(self._put_end, episode)
            self._agents.runner.submit(
                episode.record, episode.given, self._time.now, self._stop, on_end
            )

    def _put_end(self, episode: _Episode, outcome: Outcome | Exception) -> None:
        self._loop.put(partial(self._end, episode, outcome))

    def _end(self, episode: _Episode, outcome: Outcome | Exception) -> None:
        if isinstance(outcome, Exception):
            raise outcome
        reward = self._scored(episode, outcome)
        episode.outcome = outcome
        episode.is_masked = math.isnan(reward)
        self._loop.end(episode, reward)

    def _scored(self, episode: _Episode, outcome: Outcome) -> float:
        """Return the reward of an episode; NaN if it is masked."""
        cut_off = episode.record.cut_off
        if outcome.reward is not None and (leaves := episode.record.leaves):
            if len(leaves) > 1 and not episode.is_tree:
                self._agents.runner.count_branched()
            return outcome.reward
        if cut_off:
            self._agents.runner.count_cut_off(cut_off)
        else:
            why = outcome.error if outcome.reward is None else NO_REQUEST
            self._agents.count_failure(f"{episode.prompt.source}: {why}", self._step_samples)
        return math.nan

    def advance(self) -> float:
        """Do nothing: agents send their requests themselves."""
        return POLL_S

    def pause(self) -> None:
        self._time.pause()

    def resume(self) -> None:
        self._time.resume()

    def stop(self) -> None:
        self._stop.set()

    def _with_outcomes(self, group: SampleGroup, members: Sequence[_Episode]) -> SampleGroup:
        """Add what the agents printed beside their rewards."""
        places = group.episodes or range(len(members))
        outcomes = [members[place].outcome for place in places]
        return dataclasses.replace(
            group, reward_parts=_parts(outcomes) or None, answers=_answers(outcomes)
        )


def _answers(outcomes: Sequence[Outcome]) -> list[str] | None:
    """Return the answers that the recipe's reward judges; None if the episodes have their rewards. An
    episode that failed has none."""
    answers = [outcome.answer for outcome in outcomes]
    return None if all(each is None for each in answers) else [each or "" for each in answers]


def _parts(outcomes: Sequence[Outcome]) -> dict[str, torch.Tensor]:
    """Return the numbers beside the rewards, f32[G] by name; NaN if an episode has none."""
    names = sorted({name for outcome in outcomes for name in outcome.parts})
    return {
        name: torch.tensor([outcome.parts.get(name, math.nan) for outcome in outcomes])
        for name in names
    }
