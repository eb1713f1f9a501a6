"""Multi-turn rollouts are conversations between an engine and environments, which give rewards.

All episodes of a step advance together: turn k of all live episodes is one call of generate(), in the
order of prompts and samples, and the environments answer when it is complete. So every run makes the
same requests, however long anything takes, and gets the same tokens back.

Dimensions: T tokens of an episode so far, G samples a prompt.
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
from mrl.environments.base import Observation, StepResult
from mrl.environments.episodes import EpisodeFailed, Episodes, Start
from mrl.rollout.base import Completion, Request, RolloutEngine, SamplingParams, sample_seed
from mrl.system.heartbeat import beat
from mrl.types import Prompt, Sample, SampleGroup


@dataclass
class _Episode:
    prompt: Prompt
    seed: int
    """The seed of its tokens."""
    environment_seed: int
    conversation: Conversation
    rewards: list[float] = field(default_factory=list)
    """The rewards of its steps; one NaN masks the sample."""

    def finish(self, reason: FinishReason) -> None:
        self.conversation = self.conversation.finished(reason)

    def sample(self, weight_version: int) -> Sample:
        has_reward = all(math.isfinite(reward) for reward in self.rewards)
        return self.conversation.sample(weight_version, self.rewards if has_reward else ())


class MultiTurnRollout:
    """Plays one engine's share of a step, several turns a sample: a `mrl.collect.task.Rollout`."""

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
    ) -> None:
        """`sampling` describes one turn, which is shorter where the context of `context_len` ends.

        `groups` are as `start_groups` makes them, each with its seed: sample k of a prompt is drawn
        with `sample_seed(seed, prompt_id, k)`, and the environments of all its samples have one seed.
        `step_samples` is the number of samples of the step over all engines, by default that of these
        groups. No engine and no environment is called yet.
        """
        self._prompts = [group.prompt for group in groups]
        self._environments = environments
        self._tokenizer = tokenizer
        self._turns = ChatTurns(tokenizer, template_kwargs)
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
        """Indices of the prompts whose groups are not whole."""
        self._started = False
        self._num_turns = 0
        """Turns that are complete."""
        self._answers: dict[int, Completion] = {}
        """Completions of the turn that is under way, by episode."""

    @property
    def partial(self) -> list[SampleGroup]:
        """Nothing: the state of an environment is not kept for a later step."""
        return []

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded all groups."""
        return not self._waiting

    def finished(self, engine: RolloutEngine) -> Iterator[SampleGroup]:
        """Yield groups as they become whole, with rewards f32[G]: the sum over an episode's steps.

        A reward is NaN where the environment failed or an abort ended the episode. Raises as generate()
        does, and RunFailed where environments fail too often. Called again after EngineLost, it
        continues with the turn that was under way.
        """
        if not self._started:
            self._reset()
            self._started = True
        yield from self._whole_groups(engine)
        while requests := self._requests():
            missing = [r for number, r in requests.items() if number not in self._answers]
            numbers = {request.request_id: number for number, request in requests.items()}
            # The prefix cache holds the turns before and nothing else: the same bits each time.
            for completion in engine.generate(missing, reuse_cache=self._num_turns > 0):
                beat()
                self._answers[numbers[completion.request_id]] = completion
            answers, self._answers = self._answers, {}
            self._num_turns += 1
            self._advance({number: answers[number] for number in requests})
            yield from self._whole_groups(engine)

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
        """Return the request for the next turn of every live episode, by the episode's number."""
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
        """End the turn: append the completions, and let the environments answer."""
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
        """Append what the policy reads before its next turn; end where there is no room for both."""
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
        """Count an observation that cannot be given to the policy as its environment's failure."""
        self._environments.count_failure(str(error))
        self._fail(number)

    def _fail(self, number: int) -> None:
        self._episodes[number].rewards.append(math.nan)
        self._episodes[number].finish("stop")

    def _end_environments(self) -> None:
        """End the environments of episodes that are over for whatever reason."""
        over = [n for n, e in enumerate(self._episodes) if e.conversation.finish_reason is not None]
        self._environments.end(over)

    def _whole_groups(self, engine: RolloutEngine) -> Iterator[SampleGroup]:
        for i in list(self._waiting):
            first = i * self._samples_per_prompt
            members = self._episodes[first : first + self._samples_per_prompt]
            if any(episode.conversation.finish_reason is None for episode in members):
                continue
            version = engine.weight_version
            assert version is not None
            self._waiting.remove(i)
            yield SampleGroup(
                self._prompts[i],
                [episode.sample(version) for episode in members],
                rewards=torch.tensor([sum(e.rewards) for e in members], dtype=torch.float32),
            )
