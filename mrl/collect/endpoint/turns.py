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


@dataclass(frozen=True)
class Context:
    """The tokens of a request's prompt, and what they stand for."""

    conversation: Conversation
    """All P tokens; those of earlier answers as they were sampled."""
    parent: Answer | None = None
    """The answer that the request continues; None for the beginning of a conversation."""
    messages: tuple[Message, ...] = ()
    """The request's messages; empty for a prompt of text or tokens."""
    tools: str = ""
    text: str | None = None
    """The prompt, if it is plain text."""


@dataclass(frozen=True, eq=False)
class Answer:
    context: Context
    completion: Completion
    conversation: Conversation
    """The P + C tokens up to the end of the answer."""
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
