"""Plays prompts as conversations between an engine and environments: scored sample groups.

All episodes of a step advance together: turn k of all that are live is one call of generate(), in the
order of prompts and samples, and their environments answer when it is complete. So the same
requests are made in every run, whatever takes how long, and the same tokens come back.

Dimensions: T tokens of an episode so far, G samples a prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mrl.collect.conversation import FinishReason, Session
from mrl.data.chat import ChatTurns
from mrl.environments.base import Observation, StepResult
from mrl.environments.runner import EnvironmentRunner, EpisodeFailed, Start
from mrl.rollout.base import Completion, Request, RolloutEngine, SamplingParams, sample_seed
from mrl.types import Prompt, SampleGroup


@dataclass
class _Episode:
    prompt: Prompt
    seed: int
    """Of its tokens."""
    environment_seed: int
    session: Session
    rewards: list[float] = field(default_factory=list)
    """Of its steps; one NaN masks the sample."""

    def finish(self, reason: FinishReason) -> None:
        self.session = self.session.finished(reason)


class Episodes:
    """One engine's share of a step. After EngineLost, finished() may be called with another."""

    def __init__(
        self,
        groups: Sequence[SampleGroup],
        environments: EnvironmentRunner,
        tokenizer: Any,
        *,
        sampling: SamplingParams,
        max_turns: int,
        context_len: int,
        seeds: Sequence[int],
        step_samples: int | None = None,
    ) -> None:
        """`sampling` is of one turn, whose length is less where the context of `context_len` ends.

        `groups` are as `start_groups` makes them, each with its seed: sample k of a prompt is drawn
        with `sample_seed(seed, prompt_id, k)`, and all meet an environment of one seed. `step_samples`
        counts the samples of the step over all engines, by default those of these groups. Nothing is
        asked of anybody yet.
        """
        self._prompts = [group.prompt for group in groups]
        self._environments = environments
        self._tokenizer = tokenizer
        self._turns = ChatTurns(tokenizer)
        self._sampling = sampling
        self._max_turns = max_turns
        self._context_len = context_len
        self._samples_per_prompt = len(groups[0].samples) if groups else 0
        self._episodes = [
            _Episode(
                group.prompt,
                sample_seed(seed, group.prompt.prompt_id, k),
                sample_seed(seed, f"environment/{group.prompt.prompt_id}", 0),
                Session.start(sample.group_id, group.prompt.token_ids),
            )
            for group, seed in zip(groups, seeds, strict=True)
            for k, sample in enumerate(group.samples)
        ]
        self._step_samples = step_samples or len(self._episodes)
        self._waiting = list(range(len(groups)))
        """Numbers of the prompts whose groups are not whole."""
        self._started = False
        self._num_turns = 0
        """Whole turns so far."""
        self._answers: dict[int, Completion] = {}
        """Of the turn that is under way."""

    @property
    def unfinished(self) -> list[Prompt]:
        """Those whose groups finished() has not yielded."""
        return [self._prompts[i] for i in self._waiting]

    @property
    def is_over(self) -> bool:
        """Whether finished() has yielded all groups."""
        return not self._waiting

    def finished(self, engine: RolloutEngine) -> Iterator[SampleGroup]:
        """Groups as they become whole, with rewards f32[G]: the sum over an episode's steps.

        NaN where the environment failed, or an abort left the episode unfinished. Raises as generate()
        does, and RunFailed where environments fail too often; called again after EngineLost, it goes
        on with the turn that was under way.
        """
        if not self._started:
            self._reset()
            self._started = True
        yield from self._whole_groups(engine)
        while requests := self._requests():
            missing = [r for number, r in requests.items() if number not in self._answers]
            numbers = {request.request_id: number for number, request in requests.items()}
            # The turns before are in the prefix cache, and nothing else is: the same bits each time.
            for completion in engine.generate(missing, reuse_cache=self._num_turns > 0):
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
            group_id = episode.session.group_id
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
            episode.session = Session.start(group_id, torch.tensor(ids, dtype=torch.int64))
        self._end_environments()

    def _requests(self) -> dict[int, Request]:
        """The next turn of every live episode, by its number."""
        requests = {}
        for number, episode in enumerate(self._episodes):
            session = episode.session
            if session.finish_reason is not None:
                continue
            limit = self._sampling
            room = self._context_len - len(session.token_ids)
            if room < limit.max_new_tokens:
                at_least = min(limit.min_new_tokens, room)
                limit = dataclasses.replace(limit, max_new_tokens=room, min_new_tokens=at_least)
            k = number % self._samples_per_prompt
            name = f"{episode.prompt.source} group {session.group_id} sample {k}"
            requests[number] = Request(name, session.token_ids, episode.seed, limit)
        return requests

    def _advance(self, completions: dict[int, Completion]) -> None:
        """End the turn: take the completions in, and let the environments answer."""
        actions = {}
        for number, completion in completions.items():
            episode = self._episodes[number]
            episode.session = episode.session.with_completion(completion)
            if episode.session.finish_reason is not None:
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
        elif episode.session.num_turns >= self._max_turns:
            episode.finish("length")
        else:
            self._observe(number, result.observation)

    def _observe(self, number: int, observation: Observation) -> None:
        """What the policy reads before its next turn; the end where there is no room for both."""
        episode = self._episodes[number]
        session = episode.session
        try:
            ids = self._turns.between(episode.prompt, int(session.token_ids[-1]), observation)
        except ValueError as error:
            self._refuse(number, error)
            return
        if len(session.token_ids) + len(ids) >= self._context_len:
            episode.finish("length")
        else:
            episode.session = session.with_tokens(torch.tensor(ids, dtype=torch.int64))

    def _refuse(self, number: int, error: ValueError) -> None:
        """An observation that cannot be given to the policy is a failure of its environment."""
        self._environments.count_failure(str(error))
        self._fail(number)

    def _fail(self, number: int) -> None:
        self._episodes[number].rewards.append(math.nan)
        self._episodes[number].finish("stop")

    def _end_environments(self) -> None:
        """Of episodes that ended here: the last turn, the context, a refusal, an abort."""
        over = [n for n, e in enumerate(self._episodes) if e.session.finish_reason is not None]
        self._environments.end(over)

    def _whole_groups(self, engine: RolloutEngine) -> Iterator[SampleGroup]:
        for i in list(self._waiting):
            first = i * self._samples_per_prompt
            members = self._episodes[first : first + self._samples_per_prompt]
            if any(episode.session.finish_reason is None for episode in members):
                continue
            version = engine.weight_version
            assert version is not None
            self._waiting.remove(i)
            yield SampleGroup(
                self._prompts[i],
                [episode.session.sample(version) for episode in members],
                rewards=torch.tensor([sum(e.rewards) for e in members], dtype=torch.float32),
            )
