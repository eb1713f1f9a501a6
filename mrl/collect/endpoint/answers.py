"""Writes answers as OpenAI's responses, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mrl.collect.endpoint.bodies import Wanted
from mrl.collect.endpoint.texts import Texts
from mrl.collect.endpoint.turns import Answer

MODEL = "policy"
"""The name of the policy. Requests may name any other model, and still get the policy."""
DONE = b"data: [DONE]\n\n"


def chat_response(answers: Sequence[Answer], wanted: Wanted, texts: Texts) -> dict[str, Any]:
    """Return the response to a request for a chat completion."""
    choices = [
        {
            "index": index,
            "message": answer.parsed.message(),
            "finish_reason": answer.finish_reason,
            "logprobs": {"content": _logprobs(answer, texts)} if wanted.logprobs else None,
            **({"token_ids": answer.completion.output_ids.tolist()} if wanted.token_ids else {}),
        }
        for index, answer in enumerate(answers)
    ]
    response = _response("chatcmpl", "chat.completion", choices, usage_of(answers))
    if wanted.token_ids:
        response["prompt_token_ids"] = prompt_ids(answers[0])
    return response


def text_response(answers: Sequence[Answer], wanted: Wanted, texts: Texts) -> dict[str, Any]:
    """Return the response to a request for completions of text."""
    choices = [
        {
            "index": index,
            "text": answer.text,
            "finish_reason": answer.completion.finish_reason,
            "logprobs": _old_logprobs(answer, texts) if wanted.logprobs else None,
            **(
                {
                    "token_ids": answer.completion.output_ids.tolist(),
                    "prompt_token_ids": prompt_ids(answer),
                }
                if wanted.token_ids
                else {}
            ),
        }
        for index, answer in enumerate(answers)
    ]
    return _response("cmpl", "text_completion", choices, usage_of(answers))


def generate_response(answers: Sequence[Answer], texts: Texts) -> dict[str, Any]:
    """Return the response to a request of `/inference/v1/generate`. As in vLLM, each token is called
    `token_id:N` there; the renderers refuse other names."""
    choices = [
        {
            "index": index,
            "token_ids": answer.completion.output_ids.tolist(),
            "logprobs": {"content": _named_by_id(answer, texts)},
            "finish_reason": answer.completion.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    name = f"gen-{secrets.token_hex(12)}"
    return {"request_id": name, "choices": choices, "usage": usage_of(answers)}


def prompt_ids(answer: Answer) -> list[int]:
    """Return the P token ids of the prompt to which an answer was sampled."""
    return answer.context.conversation.token_ids.tolist()


def usage_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the numbers of tokens of prompts and answers; each prompt counts once."""
    prompts = {id(answer.context): answer.context.conversation.token_ids for answer in answers}
    num_prompt = sum(map(len, prompts.values()))
    num_new = sum(len(answer.completion.output_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def chat_events(response: dict[str, Any], wanted: Wanted) -> Iterator[bytes]:
    """Yield a chat response as events. Each part of a message comes in one piece."""
    head = {**response, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    for choice in response["choices"]:
        message, logprobs = choice["message"], choice["logprobs"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if message.get("reasoning_content"):
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            deltas.append({"content": message["content"]})
        for number, call in enumerate(message.get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": number, **call}]})
        for delta in deltas:
            yield _event(head, {"index": choice["index"], "delta": delta, "finish_reason": None})
        last = {key: value for key, value in choice.items() if key not in ("message", "logprobs")}
        yield _event(head, {**last, "delta": {}, "logprobs": logprobs})
    if wanted.usage:
        yield _as_event({**head, "choices": [], "usage": usage})
    yield DONE


def text_events(response: dict[str, Any], wanted: Wanted) -> Iterator[bytes]:
    """Yield a response of text as events, one for each answer."""
    head = dict(response)
    usage = head.pop("usage")
    for choice in response["choices"]:
        yield _event(head, choice)
    if wanted.usage:
        yield _as_event({**head, "choices": [], "usage": usage})
    yield DONE


def _event(head: dict[str, Any], choice: dict[str, Any]) -> bytes:
    return _as_event({**head, "choices": [choice]})


def _as_event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _response(
    prefix: str, kind: str, choices: list[dict[str, Any]], usage: dict[str, int]
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": usage,
    }


def _tokens(answer: Answer, texts: Texts) -> list[tuple[str, float]]:
    """Return the text and the log-prob of each token of an answer."""
    ids, logprobs = answer.completion.output_ids.tolist(), answer.completion.logprobs.tolist()
    return [
        (texts.decode([token], skip_special_tokens=False), logprob)
        for token, logprob in zip(ids, logprobs, strict=True)
    ]


def _logprobs(answer: Answer, texts: Texts) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
        for text, logprob in _tokens(answer, texts)
    ]


def _bytes(text: str) -> list[int] | None:
    """Return the bytes of a token's text; None if the token has only a part of a character, which
    decodes to U+FFFD."""
    return None if "\ufffd" in text else list(text.encode())


def _named_by_id(answer: Answer, texts: Texts) -> list[dict[str, Any]]:
    ids = answer.completion.output_ids.tolist()
    entries = zip(ids, _logprobs(answer, texts), strict=True)
    return [{**entry, "token": f"token_id:{token}"} for token, entry in entries]


def _old_logprobs(answer: Answer, texts: Texts) -> dict[str, Any]:
    tokens = _tokens(answer, texts)
    offsets, end = [], 0
    for text, _ in tokens:
        offsets.append(end)
        end += len(text)
    return {
        "tokens": [text for text, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
