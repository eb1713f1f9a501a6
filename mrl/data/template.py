"""Tokenization of prompts: a string unchanged, a chat through the tokenizer's template.

Dimensions: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The common roles of chat messages."""


def render_chat(
    tokenizer: Any,
    messages: list[Any],
    template_kwargs: Mapping[str, Any],
    *,
    ask: bool,
    tools: list[Any] | None,
) -> str:
    """Render messages with the tokenizer's chat template as text; with `ask`, append the start of
    the answer.

    Raises ValueError, with the template's reason, if the template refuses the messages.
    """
    more = {} if tools is None else {"tools": tools}
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask, **more, **template_kwargs
        )
    except Exception as error:  # a template may raise anything: jinja2 errors, TypeError ...
        raise ValueError(f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class PromptEncoder:
    """A tokenizer with the arguments of its chat template."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, like `data.chat_template_kwargs`."""

    def text(self, text: str) -> list[int]:
        """Return the token ids of plain text, without adding special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, content: Any, tools: list[Any] | None, source: str) -> list[int]:
        """Return the P token ids of a string, or of messages followed by the beginning of the
        answer.

        Raises InputError if the prompt has no tokens, or if the template refuses the messages.
        """
        ids = self.text(content if isinstance(content, str) else self._chat(content, tools, source))
        if not ids:
            raise InputError(f"{source}: `prompt` has no tokens in this model's vocabulary")
        return ids

    def shortened(
        self, content: Any, ids: list[int], max_len: int, tools: list[Any] | None, source: str
    ) -> tuple[Any, list[int]]:
        """Truncate a prompt at its beginning. Return the shorter prompt and its token ids, at most
        `max_len`.

        A string keeps its last tokens. A chat keeps its leading system messages and loses as many
        of its oldest turns as necessary, so that the rest starts with a user's message. Raises
        InputError if the last user message alone does not fit.
        """
        if isinstance(content, str):
            kept = ids[-max_len:]
            return self.tokenizer.decode(kept), kept
        num_system = next((i for i, m in enumerate(content) if m["role"] != "system"), len(content))
        system, rest = content[:num_system], content[num_system:]
        starts = [i for i, message in enumerate(rest) if i and message["role"] == "user"]
        for start in starts:
            shorter = [*system, *rest[start:]]
            kept = self.prompt(shorter, tools, source)
            if len(kept) <= max_len:
                return shorter, kept
        raise InputError(
            f"{source}: prompt has {len(ids)} tokens, at most {max_len} fit, and a chat cannot be cut "
            "within its last user's message; set data.overlong=filter, a smaller "
            "rollout.max_response_len or a larger rollout.context_len"
        )

    def _chat(self, messages: list[Any], tools: list[Any] | None, source: str) -> str:
        if not self.tokenizer.chat_template:
            raise InputError(
                f"{source}: `prompt` is a list of messages and this tokenizer has no chat template; "
                "use a string"
            )
        self._check_roles(messages, source)
        try:
            return render_chat(
                self.tokenizer, messages, self.template_kwargs, ask=True, tools=tools
            )
        except ValueError as error:
            raise InputError(
                f"{source}: the chat template refuses these messages: {error}"
            ) from None

    def _check_roles(self, messages: list[Any], source: str) -> None:
        """Raise InputError for a role that is neither in ROLES nor named in the template.

        A template may drop a message with such a role, or print the misspelled role.
        """
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and f"'{role}'" not in self._template_text:
                raise InputError(
                    f"{source}: message {index} has the role {role!r}, expected one of "
                    f"{', '.join(ROLES)}, or one that the chat template names"
                )

    @property
    def _template_text(self) -> str:
        """The text of the template, or of all its variants, with double quotes replaced by single
        quotes."""
        return str(self.tokenizer.chat_template).replace('"', "'")
