"""Tokenizes the text between two turns of the policy: the environment's observation, rendered with
the chat template.

Generated tokens are never tokenized again. Instead of the real conversation, the chat template
renders a short stand-in conversation, followed by the observation. Only the text after the
stand-in's assistant turn is used: the end of that turn, the new messages, and the beginning of the
next turn. Some templates change earlier turns, for example by removing the thinking. As the text of
earlier turns is not used, such templates cannot change generated tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.data.forms import tools_of
from mrl.data.template import render_chat
from mrl.errors import InputError
from mrl.types import Prompt

Messages = list[dict[str, Any]]

_TURN = "a turn of the policy 7f3a"
"""Stand-in for the text of the policy's turn. A template that repeats or drops this text cannot be
used."""
_TALK: Messages = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": _TURN},
]


class ChatTurns:
    """Renders the turns of a conversation with one tokenizer and its chat template.

    If the prompt is a list of messages, the conversation is a chat. If the prompt is a string, the
    conversation is plain text, to which observations are appended unchanged.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """`template_kwargs` are keyword arguments for the chat template, such as a recipe's
        `data.chat_template_kwargs`."""
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})

    def check(self) -> None:
        """Raise InputError if the chat template cannot render a conversation turn by turn.

        For example, a template is refused if it does not end an assistant's turn with a token that
        stops generation. With such a template, every turn would end twice: with the token at which
        the policy stopped, and with the template's own text for the end of a turn.
        """
        try:
            after = self._text_after_turn([{"role": "user", "content": "an answer"}])
            ids, stops = self._encode(after)[:1], stop_ids(self._tokenizer)
            if not stops.intersection(ids):
                raise ValueError(
                    f"an assistant's turn is followed by {self._tokenizer.decode(ids)!r}, expected a "
                    f"token that ends a generation, {self._tokenizer.decode(sorted(stops))!r}"
                )
        except ValueError as error:
            raise InputError(
                f"environment: this tokenizer's chat template cannot be used in turns: {error}; give "
                "the prompts as strings, or another template"
            ) from None

    def start(self, prompt: Prompt, observation: str | Messages | None) -> list[int]:
        """Return the token ids of the prompt and of `observation`, which the environment's reset()
        returned; None means that there is no observation.

        Only this method passes the prompt's column `tools` to the template, because the tools are
        part of the beginning of a conversation. Raises ValueError if the prompt is plain text and
        the observation is not, or if the template refuses the messages. Raises InputError if the
        column `tools` is not valid.
        """
        if observation is None:
            return prompt.token_ids.tolist()
        if isinstance(prompt.content, str):
            return prompt.token_ids.tolist() + self._encode(_plain(observation))
        tools = tools_of(prompt.columns, prompt.source)
        messages = [*prompt.content, *_messages(observation)]
        return self._encode(self._render(messages, ask=True, tools=tools))

    def between(self, prompt: Prompt, last_id: int, observation: str | Messages) -> list[int]:
        """Return the token ids between the policy's turn, whose last token is `last_id`, and its
        next turn.

        The template's token that ends a turn (see `check`) is left out if it is `last_id`, because
        the policy has generated it already. If the generation stopped at another token or was cut
        short, the end token is added. The returned tokens belong to the environment and are not
        trained on.

        Raises ValueError if the prompt is plain text and the observation is not, or if the template
        refuses the observation.
        """
        if isinstance(prompt.content, str):
            return self._encode(_plain(observation))
        return self.after_turn(last_id, _messages(observation))

    def after_turn(self, last_id: int, messages: Messages) -> list[int]:
        """Return the token ids between a turn of the policy, whose last token is `last_id`, and its
        next turn. `messages` are between them.

        Raises ValueError if the template refuses the messages. See `between`.
        """
        ids = self._encode(self._text_after_turn(messages))
        return ids[1:] if ids[:1] == [last_id] else ids

    def beginning(
        self, messages: Messages, tools: list[Any] | None, *, asks: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation that begins with `messages` and, with `asks`, those of
        the beginning of the policy's turn. Raises ValueError if the template refuses the messages."""
        return self._encode(self._render(messages, ask=asks, tools=tools))

    def check_tail(self, messages: Messages, num_new: int, tools: list[Any] | None) -> None:
        """Raise ValueError if the template renders the last `num_new` of `messages` otherwise in the
        conversation than alone, after a turn of the policy. `after_turn` would then return other
        tokens than those that the template has for this conversation."""
        after = self._text_after_turn(messages[-num_new:]).removeprefix(self._end)
        whole = self._render(messages, ask=True, tools=tools)
        if not whole.endswith(after):
            raise ValueError(
                f"the chat template renders the last {num_new} messages of this conversation as "
                f"{whole[-len(after) :][:200]!r}, but as {after[:200]!r} after a single answer"
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, without adding special tokens."""
        return self._encode(text)

    @functools.cached_property
    def _end(self) -> str:
        """The text that the template puts after the last turn of a conversation, if that turn is
        the assistant's."""
        return _after_turn(self._render(_TALK))

    def _text_after_turn(self, added: Messages) -> str:
        after = _after_turn(self._render([*_TALK, *added], ask=True))
        if not after.startswith(self._end):
            raise ValueError(
                f"an assistant's turn ends with {self._end!r} if it is the last, but continues with "
                f"{after[: len(self._end) + 20]!r} if more turns follow"
            )
        return after

    def _render(
        self, messages: Messages, *, ask: bool = False, tools: list[Any] | None = None
    ) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("there is none")
        try:
            return render_chat(
                self._tokenizer, messages, self._template_kwargs, ask=ask, tools=tools
            )
        except ValueError as error:
            raise ValueError(
                f"the chat template refuses messages of roles {[m['role'] for m in messages]}: {error}"
            ) from None

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def stop_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokens that stop a generation, as in SGLang: the end-of-sequence tokens
    of the tokenizer and of the model.

    The model's tokens are the `eos_token_id` (one id or a list) in config.json and
    generation_config.json, in the folder from which the tokenizer was loaded.
    """
    found = {tokenizer.eos_token_id}
    folder = Path(tokenizer.name_or_path or "no folder")
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.is_file():
            ids = json.loads(file.read_text()).get("eos_token_id")
            found |= set(ids) if isinstance(ids, list) else {ids}
    return found - {None}


def _after_turn(text: str) -> str:
    if text.count(_TURN) != 1:
        raise ValueError("it does not show the assistant's turn exactly once")
    return text.partition(_TURN)[2]


def _plain(observation: str | Messages) -> str:
    if not isinstance(observation, str):
        raise ValueError(
            "the environment answers with messages, but the prompt is a string; give the prompt as "
            "messages"
        )
    return observation


def _messages(observation: str | Messages) -> Messages:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return observation
