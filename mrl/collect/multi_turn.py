"""Multi-turn rollouts: conversations between an engine and environments, which return rewards.

All episodes of a step advance together. One call of generate() generates turn k of all live
episodes, in the order of prompts and samples. The environments answer when the whole turn is
complete. So the requests and their tokens do not depend on how long a completion or an environment
takes.

Dimensions: T tokens of an episode so far, G samples per prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mrl.collect.conversation import Conversation, FinishReason
from mrl.data.chat import ChatTurns
from mrl.engines.base import Completion, PolicyEndpoint, Request, sample_seed
from mrl.engines.sampling import SamplingParams
from mrl.environments.base import Observation, StepResult
from mrl.environments.episodes import EpisodeFailed, Episodes, Start
from mrl.system.heartbeat import beat, expect_samples, finish_samples
from mrl.types import Prompt, Sample, SampleGroup


@dataclass
class _Episode:
    prompt: Prompt
    seed: int
    """The seed of the sampled tokens."""
    environment_seed: int
    """The seed of the environment; the same for all samples of a prompt."""
    conversation: Conversation
    rewards: list[float] = field(default_factory=list)
    """The rewards of the environment's steps. If one of them is NaN, the sample is masked."""

    def finish(self, reason: FinishReason) -> None:
        self.conversation = self.conversation.finished(reason)

    def sample(self, weight_version: int) -> Sample:
        has_reward = all(math.isfinite(reward) for reward in self.rewards)
        return self.conversation.sample(weight_version, self.rewards if has_reward else ())


class MultiTurnRollout:
    """Generates the conversations of one engine's part of a step. It is a
    `mrl.collect.task.Rollout`."""

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        environments: Episodes,
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
        self._options = options
        self._sampling = sampling
        self._max_turns = max_turns
        self._context_len = context_len
        self._samples_per_prompt = len(groups[0].samples) if groups else 0
        self._episodes = [
            _Episode(
                group.prompt,
                sample_seed(seed, group.prompt.prompt_id, k),
                sample_seed(seed, f"environment/{group.prompt.prompt_id}", 0),
                Conversation.start(sample.group_id, group.prompt.token_ids),
            )
            for group, seed in zip(groups, seeds, strict=True)
            for k, sample in enumerate(group.samples)
        ]
        self._step_samples = step_samples or len(self._episodes)
        self._waiting = list(range(len(groups)))
        """Indices of the prompts whose groups have not been yielded yet."""
        self._started = False
        self._num_turns = 0
        """Number of turns that are complete for all live episodes."""
        self._answers: dict[int, Completion] = {}
        """Completions of the current turn, by episode number."""
        self._num_over = 0
        """The number of episodes that are over."""
        expect_samples(len(self._episodes))

    @property
    def partial(self) -> list[SampleGroup]:
        """An empty list, because the state of an environment is not kept for a later step."""
        return []

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded all groups."""
        return not self._waiting

    def finished(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        """Yield groups when they are complete, with rewards f32[G]. The reward of a sample is the
        sum of the rewards that its environment returned.

        A reward is NaN if the environment failed or an abort ended the episode. Raises the errors
        of generate(), and RunFailed if environments fail too often. After EngineLost, another call
        continues with the current turn.
        """
        if not self._started:
            self._reset()
            self._started = True
        yield from self._whole_groups(endpoint)
        while requests := self._requests():
            missing = [r for number, r in requests.items() if number not in self._answers]
            numbers = {request.request_id: number for number, request in requests.items()}
            # The prefix cache then holds only the earlier turns, so each run gets the same bits.
            reuse_cache = self._num_turns > 0
            for completion in endpoint.generate(missing, reuse_cache=reuse_cache, **self._options):
                beat()
                self._answers[numbers[completion.request_id]] = completion
            answers, self._answers = self._answers, {}
            self._num_turns += 1
            self._advance({number: answers[number] for number in requests})
            yield from self._whole_groups(endpoint)

    def _reset(self) -> None:
        starts = {
            number: Start(e.prompt, e.environment_seed) for number, e in enumerate(self._episodes)
        }
        begun = self._environments.reset(starts, step_samples=self._step_samples)
        for number, observation in begun.items():
            if isinstance(observation, EpisodeFailed):
                self._fail(number)
                continue
            episode = self._episodes[number]
            group_id = episode.conversation.group_id
            try:
                ids = self._turns.start(episode.prompt, observation)
                if len(ids) >= self._context_len:
                    raise ValueError(
                        f"reset() leaves no room for a turn: {len(ids)} tokens in a context of "
                        f"{self._context_len}"
                    )
            except ValueError as error:
                self._refuse(number, error)
                continue
            episode.conversation = Conversation.start(
                group_id, torch.tensor(ids, dtype=torch.int64)
            )
        self._end_environments()

    def _requests(self) -> dict[int, Request]:
        """Return the requests for the next turn of all live episodes, by episode number."""
        requests = {}
        for number, episode in enumerate(self._episodes):
            conversation = episode.conversation
            if conversation.finish_reason is not None:
                continue
            limit = self._sampling
            room = self._context_len - len(conversation.token_ids)
            if room < limit.max_new_tokens:
                at_least = min(limit.min_new_tokens, room)
                limit = dataclasses.replace(limit, max_new_tokens=room, min_new_tokens=at_least)
            k = number % self._samples_per_prompt
            name = f"{episode.prompt.source} group {conversation.group_id} sample {k}"
            requests[number] = Request(name, conversation.token_ids, episode.seed, limit)
        return requests

    def _advance(self, completions: dict[int, Completion]) -> None:
        """End the turn: append the completions, and pass them to the environments."""
        actions = {}
        for number, completion in completions.items():
            episode = self._episodes[number]
            episode.conversation = episode.conversation.with_completion(completion)
            if episode.conversation.finish_reason is not None:
                episode.rewards.append(math.nan)
                continue
            actions[number] = self._tokenizer.decode(
                completion.output_ids.tolist(), skip_special_tokens=True
            )
        for number, result in self._environments.step(actions).items():
            if isinstance(result, EpisodeFailed):
                self._fail(number)
            else:
                self._take(number, result)
        self._end_environments()

    def _take(self, number: int, result: StepResult) -> None:
        episode = self._episodes[number]
        episode.rewards.append(result.reward)
        if result.done or result.observation is None:
            episode.finish("stop")
        elif episode.conversation.num_turns >= self._max_turns:
            episode.finish("length")
        else:
            self._observe(number, result.observation)

    def _observe(self, number: int, observation: Observation) -> None:
        """Append an observation to the conversation. End the episode if the context has no room for
        it and another turn."""
        episode = self._episodes[number]
        conversation = episode.conversation
        try:
            ids = self._turns.between(episode.prompt, int(conversation.token_ids[-1]), observation)
        except ValueError as error:
            self._refuse(number, error)
            return
        if len(conversation.token_ids) + len(ids) >= self._context_len:
            episode.finish("length")
        else:
            episode.conversation = conversation.with_tokens(torch.tensor(ids, dtype=torch.int64))

    def _refuse(self, number: int, error: ValueError) -> None:
        """End an episode whose observation cannot be rendered as tokens, and count this as a failure
        of its environment."""
        self._environments.count_failure(str(error))
        self._fail(number)

    def _fail(self, number: int) -> None:
        self._episodes[number].rewards.append(math.nan)
        self._episodes[number].finish("stop")

    def _end_environments(self) -> None:
        """End the environments of all episodes that are over."""
        over = [n for n, e in enumerate(self._episodes) if e.conversation.finish_reason is not None]
        self._environments.end(over)
        finish_samples(len(over) - self._num_over)
        self._num_over = len(over)

    def _whole_groups(self, endpoint: PolicyEndpoint) -> Iterator[SampleGroup]:
        for i in list(self._waiting):
            first = i * self._samples_per_prompt
            members = self._episodes[first : first + self._samples_per_prompt]
            if any(episode.conversation.finish_reason is None for episode in members):
                continue
            version = endpoint.weight_version
            assert version is not None
            self._waiting.remove(i)
            yield SampleGroup(
                members[0].prompt,
                [episode.sample(version) for episode in members],
                rewards=torch.tensor([sum(e.rewards) for e in members], dtype=torch.float32),
            )
