"""Makes the tokens between turns: what an environment says, in the form that the policy reads.

Generated tokens are never tokenized again. The chat template is rendered for a short conversation that
stands in for the real one, and only the text after its assistant's turn is used: the end of that turn,
the new messages, and the beginning of the next turn. So a template that would print earlier turns
otherwise, as those do that leave out earlier thinking, does not change what was generated.
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
"""Stands in for what was generated; a template that repeats or loses it cannot be used."""
_TALK: Messages = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": _TURN},
]


class ChatTurns:
    """Renders the turns of a conversation with one tokenizer and its chat template.

    A prompt that is a list of messages makes a chat; one that is a string is plain text, to which
    observations are added as they are.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """`template_kwargs` are arguments of the template, as `data.chat_template_kwargs`."""
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})

    def check(self) -> None:
        """Raises InputError where the template cannot be continued turn by turn.

        So it is where an assistant's turn does not end with a token that generation stops at: the
        policy would end its turns otherwise than the template, which then ended them once more.
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
        """Return the token ids of the prompt and of what reset() added. Raises ValueError as
        between() does.

        The prompt's column `tools` goes into the template here, and only here: what comes between turns
        does not repeat it.
        """
        if observation is None:
            return prompt.token_ids.tolist()
        if isinstance(prompt.content, str):
            return prompt.token_ids.tolist() + self._encode(_plain(observation))
        tools = tools_of(prompt.columns, prompt.source)
        messages = [*prompt.content, *_messages(observation)]
        return self._encode(self._render(messages, ask=True, tools=tools))

    def between(self, prompt: Prompt, last_id: int, observation: str | Messages) -> list[int]:
        """Return the token ids from the end of the policy's turn, whose last token is `last_id`, to
        its next.

        The template's token that ends a turn, see check(), is left out where the policy itself wrote
        it; it follows another token that the generation stopped at. A turn that was cut
        short is ended for it: these tokens are the environment's, and not trained. Raises ValueError
        where the prompt is plain text and the observation is not, or the template refuses it.
        """
        if isinstance(prompt.content, str):
            return self._encode(_plain(observation))
        ids = self._encode(self._text_after_turn(_messages(observation)))
        return ids[1:] if ids[:1] == [last_id] else ids

    @functools.cached_property
    def _end(self) -> str:
        """Return what ends the assistant's turn when nothing follows."""
        return _after_turn(self._render(_TALK))

    def _text_after_turn(self, added: Messages) -> str:
        after = _after_turn(self._render([*_TALK, *added], ask=True))
        if not after.startswith(self._end):
            raise ValueError(
                f"an assistant's turn ends with {self._end!r} when it is the last, but goes on with "
                f"{after[: len(self._end) + 20]!r} when there is more"
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
    """Return the tokens that a generation stops at, as in SGLang: the tokenizer's and the model's.

    The model's `eos_token_id`, a number or several, is in config.json and generation_config.json of the
    folder that the tokenizer was read from.
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
