"""The tokens of one episode: what the policy was asked and what it answered, exactly as sampled.

The answers form a tree. A request that repeats earlier messages, text or tokens up to the end of an
answer continues that answer's tokens, and only what is new is tokenized. Any other request begins
another conversation. A path from a beginning to an answer that nothing continues is a branch.

Dimensions: P tokens of a request's prompt, C tokens of its answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.collect.conversation import Conversation
from mrl.collect.endpoint.generation import Generation
from mrl.collect.endpoint.messages import (
    Message,
    call_ids,
    continues,
    parse_answer,
    read_messages,
    sharing,
)
from mrl.collect.endpoint.refused import NotSent, Refused, too_long
from mrl.collect.endpoint.texts import Texts
from mrl.collect.endpoint.turns import Answer, Asked, Caller, Context, forget, share_memory
from mrl.engines.base import Completion, Request, sample_seed
from mrl.engines.sampling import MAX_STOP_STRINGS, SamplingParams
from mrl.types import Prompt, Sample, VersionSpan


class EpisodeRecord:
    """Answers the requests of one episode, and keeps what was sampled. Thread-safe."""

    def __init__(
        self,
        prompt: Prompt,
        group_id: int,
        name: str,
        seed: int,
        texts: Texts,
        generation: Generation,
        *,
        sampling: SamplingParams,
        context_len: int,
        max_turns: int,
    ) -> None:
        """`name` begins the ids of the episode's requests. `sampling` has the recipe's parameters."""
        self.prompt, self.sampling, self.context_len = prompt, sampling, context_len
        self.texts = texts
        self._group_id, self._name, self._seed = group_id, name, seed
        self._generation, self._max_turns = generation, max_turns
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._num_begun = self._num_refused = 0
        """Number of answers that were requested, and of those that the engine refused to begin. Refused
        ones do not count as turns."""
        self._asked_before: Counter[tuple[bytes, int | None]] = Counter()
        """How many answers were asked for, by the digest of the prompt's tokens and the given seed."""
        self._pending: dict[str, tuple[Request, Answer | None]] = {}
        """The open requests by their ids, each with the answer that it continues."""
        self._is_over = False
        self.cut_off = ""
        """Why a request was refused with which the policy could have gone on: the context or the number
        of turns was used up. Empty if none was."""

    def chat(self, messages: Sequence[Message], tools: str) -> Context:
        """Return the context of a chat request. Raises Refused if it cannot be rendered as tokens."""
        if messages[-1]["role"] == "assistant":
            raise Refused(
                400, "the last message is the assistant's, expected one that the policy can answer"
            )
        known = [a for a in self._known if a.messages and a.context.tools == tools]
        known = [answer for answer in known if continues(messages, answer.messages)]
        parent = max(known, key=lambda answer: len(answer.messages), default=None)
        if parent is None:
            ids = self.texts.beginning(messages, tools)
            return Context(self._begin(ids), None, tuple(messages), tools)
        last_id = int(parent.conversation.token_ids[-1])
        num_new = len(messages) - len(parent.messages)
        ids = self.texts.after_turn(last_id, messages, num_new, tools)
        longer = self._longer(parent, torch.tensor(ids, dtype=torch.int64))
        return Context(longer, parent, sharing(messages, parent.messages), parent.context.tools)

    def text(self, prompt: str) -> Context:
        """Return the context of a prompt of plain text."""
        texts = {a: a.context.text + a.text for a in self._known if a.context.text is not None}
        known = [
            answer
            for answer, text in texts.items()
            # A prompt that had an empty answer and is repeated does not continue that answer.
            if prompt.startswith(text) and prompt != answer.context.text
        ]
        parent = max(known, key=lambda answer: len(texts[answer]), default=None)
        if parent is None:
            return Context(self._begin(self.texts.encode(prompt)), text=prompt)
        new = prompt.removeprefix(texts[parent])
        new = new.removeprefix(parent.cut if new.startswith(parent.cut) else parent.stop)
        longer = self._longer(parent, torch.tensor(self.texts.encode(new), dtype=torch.int64))
        return Context(longer, parent, text=prompt)

    def tokens(
        self, ids: Sequence[int], messages: Sequence[Message] = (), tools: str = ""
    ) -> Context:
        """Return the context of a prompt i64[P] of token ids. `messages` are what the caller says that
        they stand for."""
        prompt = torch.tensor(ids, dtype=torch.int64)

        def is_continued(answer: Answer) -> bool:
            before = answer.conversation.token_ids
            return len(before) <= len(prompt) and torch.equal(prompt[: len(before)], before)

        known = [answer for answer in self._known if is_continued(answer)]
        parent = max(known, key=lambda answer: len(answer.conversation.token_ids), default=None)
        if parent is None:
            return Context(self._begin(ids), None, tuple(messages), tools)
        new = prompt[len(parent.conversation.token_ids) :]
        return Context(self._longer(parent, new), parent, sharing(messages, parent.messages), tools)

    def _begin(self, ids: Sequence[int]) -> Conversation:
        if not ids:
            raise Refused(400, "the prompt is empty, expected at least one token")
        return Conversation.start(self._group_id, torch.tensor(ids, dtype=torch.int64))

    def _longer(self, parent: Answer, new: Tensor) -> Conversation:
        """Return the conversation of an answer, continued by tokens i64[n]."""
        with self._lock:
            return parent.whole.with_tokens(new)

    @property
    def _known(self) -> list[Answer]:
        """All answers; the newest first, which is preferred among equals."""
        with self._lock:
            return self._answers[::-1]

    def answer(self, contexts: Sequence[Context], asked: Asked, caller: Caller) -> list[Answer]:
        """Let the policy answer `caller`, and record the answers to each context, in order. Waits for
        the engine. Raises Refused; nothing is recorded then."""
        requests = self._requests(contexts, asked)
        caller.requests += requests
        try:
            completions = self._generation.generate(
                requests, lambda: not (self._is_over or caller.is_gone)
            )
            return self._recorded(contexts, completions, asked, caller)
        except NotSent:
            with self._lock:
                self._num_refused += len(requests)
            raise
        finally:
            with self._lock:
                for request in requests:
                    self._pending.pop(request.request_id, None)

    def _recorded(
        self,
        contexts: Sequence[Context],
        completions: Sequence[Completion],
        asked: Asked,
        caller: Caller,
    ) -> list[Answer]:
        """Record the completions of each context, in order, and return them as answers."""
        if any(each.finish_reason == "abort" for each in completions):
            raise Refused(503, "the answer was cut off, because the engine was stopped")
        of_each = [context for context in contexts for _ in range(asked.num_answers)]
        answers = [self._answer(*pair, asked) for pair in zip(of_each, completions, strict=True)]
        with self._lock:
            if self._is_over or caller.is_gone:
                raise Refused(503, "the caller is gone, or the episode of this key is over")
            self._answers += answers
            caller.answers += answers
            for answer in answers:
                share_memory(answer)
        return answers

    def _restore(self, answer: Answer | None) -> None:
        """Record an answer again that was dropped after a request to continue it was read, and those
        before it: an agent has evidently received them. The caller holds the lock."""
        dropped = []
        while answer is not None and answer not in self._answers:
            dropped.append(answer)
            answer = answer.context.parent
        self._answers += dropped[::-1]

    def _requests(self, contexts: Sequence[Context], asked: Asked) -> list[Request]:
        prompts = [context.conversation.token_ids for context in contexts]
        limits = [self._sampling_of(len(ids), asked) for ids in prompts]
        num_answers = len(prompts) * asked.num_answers
        with self._lock:
            if self._is_over:
                raise Refused(401, "the episode of this key is over")
            if self._num_begun - self._num_refused + num_answers > self._max_turns:
                self.cut_off = self.cut_off or f"all {self._max_turns} turns were used up"
                raise Refused(
                    403,
                    f"the episode has used up its {self._max_turns} turns (environment.max_turns); "
                    "end it, and print the reward",
                    "max_turns",
                )
            requests = []
            for context, ids, sampling in zip(contexts, prompts, limits, strict=True):
                self._restore(context.parent)
                key = hashlib.sha256(ids.numpy().tobytes()).digest(), asked.seed
                for _ in range(asked.num_answers):
                    seed = self._seed_of(asked.seed, self._asked_before[key])
                    self._asked_before[key] += 1
                    name = f"{self._name} answer {self._num_begun}"
                    self._num_begun += 1
                    requests.append(Request(name, ids, seed, sampling))
                    self._pending[name] = requests[-1], context.parent
        return requests

    def _sampling_of(self, num_tokens: int, asked: Asked) -> SamplingParams:
        """Return the sampling parameters for a prompt of `num_tokens` tokens. Raises Refused if the
        context has no room for an answer."""
        limit, room = self.sampling, self.context_len - num_tokens
        if room < 1:
            self.cut_off = (
                self.cut_off or f"a prompt of {num_tokens} tokens left no room in the context"
            )
            raise too_long(num_tokens, self.context_len)
        stop = tuple(dict.fromkeys((*limit.stop, *asked.stop)))
        if len(stop) > MAX_STOP_STRINGS:
            raise Refused(400, f"stop: {len(stop)} texts, expected at most {MAX_STOP_STRINGS}")
        ids = tuple(dict.fromkeys((*limit.stop_token_ids, *asked.stop_token_ids)))
        sampling = dataclasses.replace(limit, stop=stop, stop_token_ids=ids)
        return sampling.at_most(min(room, asked.max_tokens or room))

    def _seed_of(self, given: int | None, count: int) -> int:
        """Return the seed of the answer number `count` to the same prompt. The first has the seed that
        an environment's episode would have, so the same conversation gets the same tokens."""
        if given is None and not count:
            return self._seed
        return sample_seed(self._seed, f"endpoint/{given}", count)

    def _answer(self, context: Context, completion: Completion, asked: Asked) -> Answer:
        text, stop, cut = self.texts.decode(completion.output_ids.tolist()), "", ""
        if completion.finish_reason == "stop":
            stops = [each for each in (*self.sampling.stop, *asked.stop) if each in text]
            if stops:
                stop = min(stops, key=text.find)
                end = text.find(stop)
                text, cut = text[:end], text[end:]
        parsed = parse_answer(text, with_tools=asked.parses_tools, taken=call_ids(context.messages))
        said = (*context.messages, *read_messages([parsed.message()])) if context.messages else ()
        longer = context.conversation.with_completion(completion)
        bare = dataclasses.replace(completion, routing=None, sampling_mask=None)
        return Answer(context, bare, longer, text, stop, cut, parsed, said)

    def end(self) -> None:
        """End the episode: abort its requests, and refuse others."""
        with self._lock:
            self._is_over = True
            pending = [request for request, _ in self._pending.values()]
        if pending:
            self._generation.abort(pending)

    def drop(self, caller: Caller) -> None:
        """Abort the requests of a caller that has closed its connection, and forget the answers that it
        has not received, which are those that no request continues. Call it again while the caller's
        requests are open, because a request that is being sent cannot be aborted yet."""
        with self._lock:
            caller.is_gone = True
            continued = {answer.context.parent for answer in self._answers}
            continued |= {parent for _, parent in self._pending.values()}
            dropped = {answer for answer in caller.answers if answer not in continued}
            for answer in dropped:
                forget(answer)
            self._answers = [answer for answer in self._answers if answer not in dropped]
        self._generation.abort(caller.requests)

    @property
    def leaves(self) -> list[Answer]:
        """The last answer of each branch, in the order in which they were sampled."""
        with self._lock:
            continued = {answer.context.parent for answer in self._answers}
            return [answer for answer in self._answers if answer not in continued]

    def samples(
        self, weight_version: int, *, is_masked: bool = False, is_tree: bool = False
    ) -> list[Sample]:
        """Return the samples to train on: the branch with the most sampled tokens, the newest of
        equals, and with `is_tree` also the other branches.

        Tokens that a branch shares with earlier ones are context in it, so each sampled token is in
        the loss once. Without an answer, the sample is the row's prompt, with an empty span of
        version `weight_version`. A sample that is masked is one branch and ends with the reason
        `abort`.
        """
        newest_first = self.leaves[::-1]
        leaves = sorted(newest_first, key=lambda leaf: -int(leaf.conversation.loss_mask.sum()))
        if not leaves:
            none = Conversation.start(self._group_id, self.prompt.token_ids)
            return [none.finished("abort").sample(weight_version)]
        reason = "abort" if is_masked else "length" if self.cut_off else "stop"
        if is_masked or not is_tree:
            return [leaves[0].conversation.finished(reason).sample(weight_version)]
        counted: set[Answer] = set()
        found = []
        for leaf in leaves:
            path = list(_path(leaf))
            branch = _without(leaf.conversation, [each for each in path if each in counted])
            counted.update(path)
            found.append(branch.finished(reason).sample(weight_version))
        return found


def _path(leaf: Answer) -> Iterator[Answer]:
    """Yield the answers of a branch, from its last to its first."""
    answer: Answer | None = leaf
    while answer is not None:
        yield answer
        answer = answer.context.parent


def _without(conversation: Conversation, answers: Sequence[Answer]) -> Conversation:
    """Return a conversation in which the tokens of some of its answers are context."""
    mask, logprobs = conversation.loss_mask.clone(), conversation.rollout_logprobs.clone()
    dropped: set[VersionSpan] = set()
    for answer in answers:
        start, end = len(answer.context.conversation.token_ids), len(answer.conversation.token_ids)
        mask[start:end], logprobs[start:end] = False, 0.0
        dropped.update(answer.completion.weight_versions)
    return dataclasses.replace(
        conversation,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        weight_versions=tuple(s for s in conversation.weight_versions if s not in dropped),
    )
