"""Between texts and tokens, for many threads: the tokenizer and chat template of a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.collect.endpoint.messages import Message, for_template
from mrl.collect.endpoint.refused import Refused
from mrl.data.chat import ChatTurns


class Texts:
    """Renders and tokenizes texts for many threads. Tokenizers themselves are not thread-safe, because
    a call changes their settings."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._turns = ChatTurns(tokenizer, template_kwargs)
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return self._turns.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with self._lock:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def beginning(self, messages: Sequence[Message], tools: str, *, asks: bool = True) -> list[int]:
        """Return the token ids of a whole conversation and, with `asks`, of the beginning of the next
        answer. `tools` are JSON, or empty. Raises Refused if the template refuses the messages."""
        with self._lock:
            try:
                return self._turns.beginning(for_template(messages), _parsed(tools), asks=asks)
            except ValueError as error:
                raise Refused(400, str(error)) from None

    def after_turn(
        self, last_id: int, messages: Sequence[Message], num_new: int, tools: str
    ) -> list[int]:
        """Return the token ids of the last `num_new` messages, which follow an answer whose last token
        is `last_id`. Raises Refused if the template refuses the messages, or renders these otherwise in
        the whole conversation."""
        rendered = for_template(messages)
        with self._lock:
            try:
                self._turns.check_tail(rendered, num_new, _parsed(tools))
                return self._turns.after_turn(last_id, rendered[-num_new:])
            except ValueError as error:
                raise Refused(400, str(error)) from None


def as_text(tools: list[Any] | None) -> str:
    """Return the tools of a request as JSON, by which they are compared; empty if there are none. Their
    keys keep the order in which the template shows them."""
    return json.dumps(tools) if tools else ""


def _parsed(tools: str) -> list[Any] | None:
    return json.loads(tools) if tools else None
