"""The tokenizer of the service's model, for clients that have no tokenizer of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, Strict, ValidationError, model_validator

from mrl.config.branch import Branch
from mrl.config.explain import first_problem
from mrl.data.template import render_chat
from mrl.diagnosis.pieces import token_pieces
from mrl.errors import InputError
from mrl.preflight.check import load_tokenizer
from parallel.hf_config import HfModel

Text = Annotated[str, Strict()]


class EncodeBody(Branch):
    texts: list[Text] = Field(min_length=1)


class ChatBody(Branch):
    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: Annotated[bool, Strict()] = True
    """End with the generation prompt, the beginning of the assistant's answer."""
    tools: list[Any] | None = None

    @model_validator(mode="after")
    def _has_messages(self) -> Self:
        for number, each in enumerate(self.messages):
            if not isinstance(each.get("role"), str) or not {"content", "tool_calls"} & set(each):
                raise ValueError(f"message {number} needs a role and content, got {sorted(each)}")
        return self


class DecodeBody(Branch):
    tokens: list[list[Annotated[int, Strict(), Field(ge=0)]]] = Field(min_length=1)
    skip_special: Annotated[bool, Strict()] = False
    """Leave out special tokens, such as the one that ends an answer."""


BODIES = {"encode": EncodeBody, "encode_chat": ChatBody, "decode": DecodeBody}


class ServiceTokenizer:
    """Encodes and decodes texts. Any thread may call it; the first call loads the tokenizer."""

    def __init__(self, model: HfModel) -> None:
        self._model = model
        self._using = threading.Lock()

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model)

    def answer(self, action: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of `/tokenizer/ACTION`, an object with the key `tokens` or `texts`.
        Raises InputError if the action or its body is not allowed."""
        if action not in BODIES:
            raise InputError(f"the tokenizer has {', '.join(BODIES)}, got {action[:80]!r}")
        try:
            body = BODIES[action].model_validate(given)
        except ValidationError as error:
            raise InputError(f"{action}: {first_problem(error, 'body')}") from None
        with self._using:
            if isinstance(body, EncodeBody):
                return {"tokens": [self._encode(text) for text in body.texts]}
            if isinstance(body, ChatBody):
                return {"tokens": self._encode(self._chat(body))}
            return {"texts": [self.text(ids, body.skip_special) for ids in body.tokens]}

    def text(self, tokens: list[int], skip_special: bool = False) -> str:
        """Return the text of token ids. Raises InputError if one of the ids is not in the
        vocabulary."""
        if tokens and max(tokens) >= self._model.sizes.vocab_size:
            raise InputError(
                f"token {max(tokens)}, expected 0 to {self._model.sizes.vocab_size - 1}: the model has "
                f"{self._model.sizes.vocab_size} tokens"
            )
        return self._tokenizer.decode(tokens, skip_special_tokens=skip_special)

    def pieces(self, tokens: Sequence[int]) -> dict[int, str]:
        """Return the text of each token id, for a token record."""
        with self._using:
            return token_pieces(self._tokenizer, tokens)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _chat(self, body: ChatBody) -> str:
        if not self._tokenizer.chat_template:
            raise InputError(
                "the tokenizer of the service's model has no chat template; use encode instead"
            )
        try:
            return render_chat(
                self._tokenizer, body.messages, {}, ask=body.add_generation_prompt, tools=body.tools
            )
        except ValueError as error:
            raise InputError(f"the chat template refuses these messages: {error}") from None
