"""Reads JSONL files. Every bad row is found at load, named by `file:line`, and stops the run.

Dimensions: P prompt tokens, T all tokens of an SFT example.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.errors import InputError
from mrl.types import Prompt


@dataclass(frozen=True)
class SftExample:
    """An `SftExample` is one row of the SFT data, tokenized."""

    token_ids: Tensor
    """i64[T]: prompt, completion, end-of-sequence token."""
    prompt_len: int
    source: str
    """`file:line`, for error messages."""


def read_prompts(
    path: str | Path,
    tokenizer: Any,
    *,
    max_prompt_len: int,
    max_response_len: int = 0,
    min_rows: int = 1,
) -> list[Prompt]:
    """Read and tokenize every row of a JSONL file.

    `max_prompt_len` is the context less `max_response_len`, in tokens; the latter only explains
    the limit in the error. `min_rows` is the number of prompts of one step.
    Raises InputError, as `file:line: reason` where one row is to blame.
    """
    prompts = []
    for source, row in read_rows(Path(path)):
        content = row.pop("prompt", None)
        ids = _prompt_ids(content, tokenizer, source)
        if len(ids) > max_prompt_len:
            raise InputError(
                f"{source}: prompt has {len(ids)} tokens, at most {max_prompt_len} fit (context "
                f"{max_prompt_len + max_response_len} - response {max_response_len}); shorten the "
                "prompt, or set a smaller rollout.max_response_len or a larger rollout.context_len"
            )
        prompts.append(Prompt(str(len(prompts)), torch.tensor(ids), content, row, source))
    if len(prompts) < min_rows:
        raise InputError(
            f"{path}: {len(prompts)} prompts, a step needs {min_rows}; add rows or set a smaller "
            "rollout.prompts_per_step"
        )
    return prompts


def read_sft_examples(
    path: str | Path, tokenizer: Any, *, max_len: int | None = None
) -> list[SftExample]:
    """Read `prompt` + `completion` rows as token ids that end with the end-of-sequence token.

    `max_len` is the context in tokens. Raises InputError, as `file:line: reason`.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(f"{path}: the tokenizer has no end-of-sequence token to learn to stop on")
    examples = []
    for source, row in read_rows(Path(path)):
        prompt_ids = _prompt_ids(row.get("prompt"), tokenizer, source)
        completion = row.get("completion")
        if not isinstance(completion, str) or not completion:
            raise InputError(f"{source}: `completion` must be a string of at least one character")
        ids = [*prompt_ids, *_encode(tokenizer, completion), tokenizer.eos_token_id]
        if max_len is not None and len(ids) > max_len:
            raise InputError(
                f"{source}: prompt and completion have {len(ids)} tokens, at most {max_len} fit"
            )
        examples.append(SftExample(torch.tensor(ids), len(prompt_ids), source))
    return examples


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `file:line` and the object of every row, without blank lines. Raises where there are
    none."""
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines(): JSON may hold U+2028 and friends
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give the path of a JSONL file") from None
    empty = True
    for number, line in enumerate(lines, start=1):
        if line.strip():
            empty = False
            yield f"{path}:{number}", _parse_row(line, f"{path}:{number}")
    if empty:
        raise InputError(f"{path}: no rows; one JSON object with `prompt` per line is expected")


def _parse_row(line: bytes, source: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise InputError(f"{source}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(f"{source}: expected a JSON object, got {_kind(row)}")
    return row


def _prompt_ids(content: Any, tokenizer: Any, source: str) -> list[int]:
    """Return the token ids of a string (as it is) or of chat messages (template + generation
    prompt)."""
    if content is None:
        raise InputError(f"{source}: no `prompt`")
    if not isinstance(content, (str, list)):
        raise InputError(
            f"{source}: `prompt` must be a string or a list of messages, got {_kind(content)}"
        )
    if not content or (isinstance(content, str) and not content.strip()):
        raise InputError(f"{source}: `prompt` is empty")
    if isinstance(content, str):
        ids = _encode(tokenizer, content)
    else:
        _check_messages(content, source)
        ids = _encode_chat(tokenizer, content, source)
    if not ids:
        raise InputError(f"{source}: `prompt` has no tokens in this model's vocabulary")
    return ids


def _check_messages(messages: list[Any], source: str) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InputError(f"{source}: message {index} must be an object, got {_kind(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str) or not message[key]:
                raise InputError(f"{source}: message {index} has no text in `{key}`")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _encode_chat(tokenizer: Any, messages: list[Any], source: str) -> list[int]:
    if not tokenizer.chat_template:
        raise InputError(
            f"{source}: `prompt` is a list of messages and this tokenizer has no chat template; "
            "use a string"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like: jinja2 errors, TypeError ...
        raise InputError(
            f"{source}: the chat template refuses these messages: {type(error).__name__}: {error}"
        ) from None
    return _encode(tokenizer, text)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
