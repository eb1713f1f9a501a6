"""Tokenizes prompts: strings unchanged, lists of messages through the tokenizer's chat template.

Dimensions: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages that are accepted with every chat template."""


def render_chat(
    tokenizer: Any,
    messages: list[Any],
    template_kwargs: Mapping[str, Any],
    *,
    ask: bool,
    tools: list[Any] | None,
) -> str:
    """Return messages as text, rendered with the tokenizer's chat template. With `ask`, the text ends
    with the beginning of the assistant's answer.

    `tools` are passed to the template unless they are None. Raises ValueError, with the template's
    reason, if the template refuses the messages.
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
    """Tokenizes prompts with one tokenizer and fixed arguments of its chat template."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the chat template, such as a recipe's `data.chat_template_kwargs`."""

    def text(self, text: str) -> list[int]:
        """Return the token ids of plain text, without adding special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, content: Any, tools: list[Any] | None, source: str) -> list[int]:
        """Return the P token ids of a prompt. `content` is a string or a list of messages. After
        the messages, the template adds the beginning of the answer.

        Raises InputError if the prompt has no tokens, if the tokenizer has no chat template for
        messages, or if the template refuses the messages. `source` names the row in the message.
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

        `ids` are the token ids of the complete prompt `content`. A string keeps its last tokens. A
        chat keeps its leading system messages and loses as many of its oldest turns as necessary;
        what is left of the turns starts with a user's message. Raises InputError if even the
        shortest such chat does not fit: the system messages, the last user message and the messages
        after it.
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
                "give a string, or put the chat_template.jinja of its chat version into model.path"
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
        """Raise InputError if a message has a role that is neither in ROLES nor named in the chat
        template. A template may silently drop such a message, or show a misspelled role to the model.
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
        """The text of the chat template, or of all its variants, with single quotes in place of
        double quotes."""
        return str(self.tokenizer.chat_template).replace('"', "'")
