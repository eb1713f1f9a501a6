"""Multi-turn rollouts: conversations between an engine and environments, which return rewards.

Each episode advances on its own: its next turn is generated as soon as its environment has answered.
All turns that can be generated at one moment go to the engine as one call of generate().

Dimensions: T tokens of an episode so far, G samples per prompt.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mrl.collect.conversation import Conversation, FinishReason
from mrl.collect.endpoint.generation import Generation
from mrl.collect.endpoint.refused import Refused
from mrl.collect.episode_loop import POLL_S, EpisodeLoop, GroupEpisodes
from mrl.collect.gathering import Gathering
from mrl.data.chat import ChatTurns
from mrl.engines.base import Completion, EngineLost, PolicyEndpoint, Request, sample_seed
from mrl.engines.sampling import SamplingParams
from mrl.environments.base import Observation, StepResult
from mrl.environments.command import MAX_REWARD
from mrl.environments.episodes import EpisodeFailed, Start
from mrl.environments.runner import EnvironmentRunner
from mrl.errors import RunFailed
from mrl.types import Prompt, Sample, SampleGroup

Take = Callable[["_Episode", Any], None]
"""Takes an answer for an episode, in the rollout's thread."""


class GroupEnvironments(GroupEpisodes[EnvironmentRunner]):
    """The environments of some groups, while other groups use the same runner."""


@dataclass(eq=False)
class _Episode:
    prompt: Prompt
    index: int
    """The place of the episode in the rollout."""
    name: str
    """Begins the ids of its requests."""
    seed: int
    """The seed of the sampled tokens."""
    environment_seed: int
    """The seed of the environment; the same for all samples of a prompt."""
    conversation: Conversation
    rewards: list[float] = field(default_factory=list)
    """The rewards of the environment's steps. If one of them is NaN, the sample is masked."""
    number: int | None = None
    """The runner's number of the episode; None before it begins and after it has ended."""

    def samples(self, weight_version: int) -> list[Sample]:
        has_reward = all(math.isfinite(reward) for reward in self.rewards)
        return [self.conversation.sample(weight_version, self.rewards if has_reward else ())]


class MultiTurnRollout:
    """Generates the conversations of one engine's part of a step. It is a
    `mrl.collect.task.Rollout`, and the `Player` of its episodes."""

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        environments: GroupEnvironments,
        tokenizer: Any,
        *,
        sampling: SamplingParams,
        max_turns: int,
        context_len: int,
        seeds: Sequence[int],
        step_samples: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, bool] = {},
    ) -> None:
        """`sampling` has the parameters of one turn. A turn also ends when the conversation has
        `context_len` tokens.

        `groups` come from `start_groups`, and `seeds` has one seed for each group. Sample k of a
        prompt uses the seed `sample_seed(seed, prompt_id, k)`; the environments of all samples of a
        prompt use the same seed. `step_samples` is the number of samples of the step over all
        engines, by default the number of samples in `groups`. `options` are passed on to
        `PolicyEndpoint.generate`.
        """
        self._environments = environments
        self._tokenizer = tokenizer
        self._turns = ChatTurns(tokenizer, template_kwargs)
        self._sampling = sampling
        self._max_turns = max_turns
        self._context_len = context_len
        by_group: list[list[_Episode]] = []
        self._episodes: list[_Episode] = []
        for group, seed in zip(groups, seeds, strict=True):
            for k, sample in enumerate(group.samples):
                episode = _Episode(
                    group.prompt,
                    len(self._episodes),
                    f"{group.prompt.source} group {sample.group_id} sample {k}",
                    sample_seed(seed, group.prompt.prompt_id, k),
                    sample_seed(seed, f"environment/{group.prompt.prompt_id}", 0),
                    Conversation.start(sample.group_id, group.prompt.token_ids),
                )
                self._episodes.append(episode)
            by_group.append(self._episodes[len(self._episodes) - len(group.samples) :])
        self._step_samples = step_samples or len(self._episodes)
        self._generation = Generation(options)
        self._loop = EpisodeLoop(by_group, self, self._generation)
        self._ready: list[_Episode] = []
        """The episodes whose next turn has to be generated."""
        self._num_live = len(self._episodes)
        self._gathering = Gathering()
        self._num_ending = 0
        """The number of ended episodes whose environments are not closed yet."""

    @property
    def partial(self) -> list[SampleGroup]:
        """An empty list, because the state of an environment is not kept for a later step."""
        return []

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded all groups."""
        return self._loop.is_over

    @property
    def is_ending(self) -> bool:
        return self._num_ending > 0

    def finished(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        """Yield groups when they are complete, with rewards f32[G]. The reward of a sample is the
        sum of the rewards that its environment returned.

        A reward is NaN if the environment failed or an abort ended the episode. Raises the errors
        of generate(), and RunFailed if environments fail too often. After EngineLost, another call
        continues: turns that were not complete are generated again, and environments go on.
        """
        return self._loop.finished(endpoint)

    def begin(self) -> None:
        for episode in self._episodes:
            on_begun = partial(self._put, self._take_begun, episode)
            start = Start(episode.prompt, episode.environment_seed)
            episode.number = self._environments.runner.begin(start, on_begun)

    def resume(self) -> None:
        """Do nothing: what waits for an engine is sent by `advance`."""

    def pause(self) -> None:
        """Do nothing: environments go on, and the next turns wait for the next engine."""

    def stop(self) -> None:
        for episode in self._episodes:
            if episode.number is not None:
                self._environments.runner.end(episode.number)
                episode.number = None

    def _put(self, take: Take, episode: _Episode, answer: Any) -> None:
        """Let the rollout's thread take an answer for an episode. Any thread may call this."""
        self._loop.put(partial(self._deliver, take, episode, answer))

    def _deliver(self, take: Take, episode: _Episode, answer: Any) -> None:
        if isinstance(answer, RunFailed):
            raise answer
        if isinstance(answer, EpisodeFailed):
            self._fail(episode, answer.reason)
        else:
            take(episode, answer)

    def _take_begun(self, episode: _Episode, observation: Observation | None) -> None:
        try:
            ids = self._turns.start(episode.prompt, observation)
            if len(ids) >= self._context_len:
                raise ValueError(
                    f"reset() leaves no room for a turn: {len(ids)} tokens in a context of "
                    f"{self._context_len}"
                )
        except ValueError as error:
            self._fail(episode, str(error))
            return
        group_id = episode.conversation.group_id
        episode.conversation = Conversation.start(group_id, torch.tensor(ids, dtype=torch.int64))
        self._make_ready(episode)

    def advance(self) -> float:
        """Send the next turns of all episodes that are ready, as one call of generate(), unless others
        will be ready in a moment."""
        if not self._ready:
            return POLL_S
        if (wait_s := self._gathering.wait_s(self._num_live)) > 0:
            return min(wait_s, POLL_S)
        batch = sorted(self._ready, key=lambda episode: episode.index)
        self._ready = []
        asked = [(self._request(episode), episode) for episode in batch]
        threading.Thread(
            target=self._generate, args=(asked,), name="mrl-turns", daemon=True
        ).start()
        return POLL_S

    def _request(self, episode: _Episode) -> Request:
        conversation = episode.conversation
        limit = self._sampling.at_most(self._context_len - len(conversation.token_ids))
        # The call with the last turn may still be open, so the id of this turn is another one.
        name = f"{episode.name} turn {conversation.num_turns}"
        return Request(name, conversation.token_ids, episode.seed, limit)

    def _generate(self, asked: Sequence[tuple[Request, _Episode]]) -> None:
        """Generate turns, in a thread that ends with their call of generate()."""
        waiting = {request.request_id: episode for request, episode in asked}
        sent_at = time.monotonic()
        try:
            for completion in self._generation.stream([request for request, _ in asked]):
                episode = waiting.pop(completion.request_id)
                self._gathering.note_turn(time.monotonic() - sent_at, len(completion.output_ids))
                self._put(self._take_turn, episode, completion)
        except (EngineLost, Refused):
            self._loop.put(partial(self._wait_again, list(waiting.values())))
        except Exception as error:
            self._loop.put(partial(_raise, error))

    def _wait_again(self, episodes: Sequence[_Episode]) -> None:
        for episode in episodes:
            self._make_ready(episode)

    def _make_ready(self, episode: _Episode) -> None:
        self._ready.append(episode)
        self._gathering.note_ready()

    def _take_turn(self, episode: _Episode, completion: Completion) -> None:
        """Append the policy's turn to the conversation, and pass it to the environment."""
        episode.conversation = episode.conversation.with_completion(completion)
        if episode.conversation.finish_reason is not None:
            episode.rewards.append(math.nan)
            self._end(episode)
            return
        text = self._tokenizer.decode(completion.output_ids.tolist(), skip_special_tokens=True)
        assert episode.number is not None
        on_step = partial(self._put, self._take_step, episode)
        self._environments.runner.step(episode.number, text, on_step)

    def _take_step(self, episode: _Episode, result: StepResult) -> None:
        episode.rewards.append(result.reward)
        total = sum(episode.rewards)
        if abs(total) > MAX_REWARD:
            self._fail(episode, f"the sum of its rewards is {total:g}, too large for float32")
        elif result.done or result.observation is None:
            self._end(episode, "stop")
        elif episode.conversation.num_turns >= self._max_turns:
            self._end(episode, "length")
        else:
            self._observe(episode, result.observation)

    def _observe(self, episode: _Episode, observation: Observation) -> None:
        """Append an observation to the conversation. End the episode if the context has no room for
        it and another turn."""
        conversation = episode.conversation
        try:
            ids = self._turns.between(episode.prompt, int(conversation.token_ids[-1]), observation)
        except ValueError as error:
            self._fail(episode, str(error))
            return
        if len(conversation.token_ids) + len(ids) >= self._context_len:
            self._end(episode, "length")
        else:
            episode.conversation = conversation.with_tokens(torch.tensor(ids, dtype=torch.int64))
            self._make_ready(episode)

    def _fail(self, episode: _Episode, reason: str) -> None:
        """End and mask an episode whose environment failed, or said what is no text for the policy."""
        episode.rewards.append(math.nan)
        self._end(episode, "stop")
        self._environments.count_failure(reason, self._step_samples)

    def _end(self, episode: _Episode, reason: FinishReason | None = None) -> None:
        """End an episode, for `reason` if its conversation has not ended yet."""
        if reason is not None:
            episode.conversation = episode.conversation.finished(reason)
        assert episode.number is not None
        self._num_live -= 1
        self._num_ending += 1
        self._environments.runner.end(episode.number, partial(self._loop.put, self._note_closed))
        episode.number = None
        self._loop.end(episode, sum(episode.rewards))

    def _note_closed(self) -> None:
        self._num_ending -= 1


def _raise(error: Exception) -> None:
    raise error
