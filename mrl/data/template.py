"""Turns a prompt into tokens: a string as it is, a chat through the tokenizer's template.

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
    """Return the messages in the tokenizer's chat template; `ask` adds the beginning of the answer.

    Raises ValueError, with the template's reason, where it refuses them.
    """
    more = {} if tools is None else {"tools": tools}
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask, **more, **template_kwargs
        )
    except Exception as error:  # templates raise what they like: jinja2 errors, TypeError ...
        raise ValueError(f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class PromptEncoder:
    """A `PromptEncoder` holds a tokenizer and the arguments of its chat template."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The same as `data.chat_template_kwargs`."""

    def text(self, text: str) -> list[int]:
        """Return the token ids of plain text, without special tokens of the tokenizer's own."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, content: Any, tools: list[Any] | None, source: str) -> list[int]:
        """Return the P token ids of a string, or of messages with the beginning of the answer.

        Raises InputError where there are none, or the template refuses the messages.
        """
        ids = self.text(content if isinstance(content, str) else self._chat(content, tools, source))
        if not ids:
            raise InputError(f"{source}: `prompt` has no tokens in this model's vocabulary")
        return ids

    def shortened(
        self, content: Any, ids: list[int], max_len: int, tools: list[Any] | None, source: str
    ) -> tuple[Any, list[int]]:
        """Return a prompt of more than `max_len` tokens cut at its beginning, and its at most max_len
        token ids.

        A string keeps its last tokens. A chat keeps its leading system messages and loses its oldest
        turns, up to a user's message each, so that what is left is a whole chat. Raises InputError
        where the last of the user's messages alone does not fit.
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
        """Raise InputError for a role that is neither common nor named in the template: a template may
        omit such a message, or write its misspelled role."""
        for index, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and f"'{role}'" not in self._template_text:
                raise InputError(
                    f"{source}: message {index} has the role {role!r}, expected one of "
                    f"{', '.join(ROLES)}, or one that the chat template names"
                )

    @property
    def _template_text(self) -> str:
        """The text of the template, or of all its variants, with only one kind of quotes."""
        return str(self.tokenizer.chat_template).replace('"', "'")
