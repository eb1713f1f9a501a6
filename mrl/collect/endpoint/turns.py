"""Turns of an episode: what a request asks for, the tokens that it continues, and its answers.

Dimensions: P tokens of a request's prompt, C tokens of its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mrl.collect.conversation import Conversation
from mrl.collect.endpoint.messages import Message, Parsed
from mrl.engines.base import Completion, Request


@dataclass(frozen=True)
class Asked:
    """How the answers to a request are sampled."""

    num_answers: int = 1
    max_tokens: int | None = None
    """At most this many tokens; None and larger numbers mean `rollout.max_response_len`."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Mixed with the episode's own seed."""
    parses_tools: bool = False
    """Whether tool calls are looked for in the answers."""


@dataclass(eq=False)
class Context:
    """The tokens of a request's prompt, and what they stand for. Only `share_memory` changes it."""

    conversation: Conversation
    """All P tokens; those of earlier answers as they were sampled."""
    parent: Answer | None = None
    """The answer that the request continues; None for the beginning of a conversation."""
    messages: tuple[Message, ...] = ()
    """The request's messages; empty for a prompt of text or tokens."""
    tools: str = ""
    text: str | None = None
    """The prompt, if it is plain text."""


@dataclass(eq=False)
class Answer:
    """An answer of the policy. Only `share_memory` changes it."""

    context: Context
    completion: Completion
    """What the engine returned, without routes and sampling masks, which `conversation` has."""
    conversation: Conversation
    """The P + C tokens up to the end of the answer. If there is a `continuation`, without the data of
    routes and sampling mask; `whole` has them."""
    text: str
    """The answer without special tokens, up to a stop text."""
    stop: str
    """The stop text that ended the answer; empty if none did."""
    cut: str
    """What follows `text` in the answer's tokens: the stop text, and what its last token has after
    it."""
    parsed: Parsed
    messages: tuple[Message, ...]
    """The request's messages and the answer; empty for a prompt of text or tokens."""
    continuation: Answer | None = None
    """The answer that continues this one and holds its routes and sampling mask; None if there is
    none."""

    @property
    def whole(self) -> Conversation:
        """The conversation with its routes and sampling mask. Reading it needs the lock of the
        episode."""
        if self.continuation is None:
            return self.conversation
        last = self.continuation
        while last.continuation is not None:
            last = last.continuation
        return self.conversation.restored(last.conversation)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for the end of the answer."""
        return "tool_calls" if self.parsed.calls else self.completion.finish_reason


@dataclass
class Caller:
    """One HTTP request that waits for answers."""

    requests: list[Request] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """What was recorded for this request."""
    is_gone: bool = False
    """Whether the connection was closed. Answers that come later are not recorded."""


def share_memory(answer: Answer) -> None:
    """Record that an answer continues its branch, whose earlier turns then use its memory. The caller
    holds the lock of the episode.

    Otherwise each turn would keep the routes of all tokens before it, and the memory of an episode
    would be quadratic in its turns.
    """
    whole, each = answer.conversation, answer
    while True:
        context = each.context
        context.conversation = context.conversation.sharing(whole)
        parent = context.parent
        if parent is None:
            return
        parent.conversation = parent.conversation.sharing(whole)
        parent.continuation = parent.continuation or each
        each = parent


def forget(answer: Answer) -> None:
    """Undo `share_memory` for an answer that nothing continues."""
    parent = answer.context.parent
    if parent is not None and parent.continuation is answer:
        parent.conversation, parent.continuation = parent.whole, None
