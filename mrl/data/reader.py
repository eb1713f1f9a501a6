"""Reads and tokenizes prompts and SFT examples. All rows are checked when the data is read: a bad row
raises InputError with the row's source, such as `file:line`.

Dimensions: T all tokens of an SFT example.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.config import DataConfig, SourceConfig
from mrl.config.data import paths_of
from mrl.config.reward import describe_rewards
from mrl.data.files import Tasks
from mrl.data.forms import Row, tools_of
from mrl.data.rows import read_forms
from mrl.data.template import PromptEncoder
from mrl.errors import InputError
from mrl.types import Prompt

_NOT_IN_KEYS = re.compile(r"[^\w.\-]")


@dataclass(frozen=True)
class SftExample:
    """One tokenized row of the SFT data."""

    token_ids: Tensor
    """i64[T]: prompt, completion, end-of-sequence token."""
    prompt_len: int
    source: str
    """Where the example comes from, as `file:line`, for error messages."""


@dataclass(frozen=True)
class Source:
    """One source of the training data, read and tokenized."""

    name: str
    prompts: list[Prompt]
    weight: float | None
    forms: tuple[str, ...]
    """The different forms of the source's rows (`Row.form`), the most frequent first."""
    num_filtered: int = 0
    """Number of rows that were left out because they are too long (`data.overlong: filter`)."""
    num_truncated: int = 0
    """Number of prompts whose beginning was cut off (`data.overlong: truncate_left`)."""
    num_with_tools: int = 0
    """Number of prompts whose column `tools` was passed to the chat template."""
    skips_template: bool = False
    """Whether prompts are strings although the tokenizer has a chat template, which they do not get."""

    def describe(self) -> str:
        """Return the counts in words, for the terminal."""
        parts = [f"{len(self.prompts)} prompts from {' and '.join(self.forms)}"]
        if self.num_filtered:
            parts.append(f"{self.num_filtered} too long and left out")
        if self.num_truncated:
            parts.append(f"{self.num_truncated} cut at the beginning")
        if self.num_with_tools:
            parts.append(f"{self.num_with_tools} with tools")
        if self.skips_template:
            parts.append("strings do not go through the chat template")
        return ", ".join(parts)


def read_sources(
    config: DataConfig,
    tokenizer: Any,
    *,
    max_prompt_len: int,
    max_response_len: int = 0,
    min_rows: int = 1,
    is_evaluation: bool = False,
    tasks: Tasks | None = None,
) -> list[Source]:
    """Read and tokenize every row of the training data, source by source.

    `max_prompt_len` is the context length minus `max_response_len`, in tokens; `max_response_len`
    and `is_evaluation` only affect error messages. `min_rows` is the number of prompts in a step.
    `tasks` loads the tasks of the recipe's environment, for the path ENVIRONMENT_TASKS.
    Raises InputError if the data is not valid; if a single row is the cause, the message is
    `file:line: reason`.
    """
    encoder = PromptEncoder(tokenizer, config.chat_template_kwargs)
    found: list[Source] = []
    taken = {each.name for each in config.all_sources if each.name is not None}
    keys: dict[str, str] = {}
    num_rows = 0
    for each in config.all_sources:
        name = first = source_name(each)
        numbered = (f"{first}_{number}" for number in itertools.count(2))
        while each.name is None and name in taken:
            name = next(numbered)
        taken.add(name)
        _refuse_same_key(name, keys)
        reading = _Reading(
            encoder, config.overlong, max_prompt_len, max_response_len, num_rows, is_evaluation,
            tasks,
        )  # fmt: skip
        prompts = reading.prompts(each, name if len(config.sources) > 1 else None)
        num_rows = reading.num_rows
        if not prompts:
            raise InputError(
                f"{', '.join(paths_of(each.path))}: all {reading.num_filtered} prompts are longer than "
                f"{max_prompt_len} tokens and were left out (data.overlong: filter)"
            )
        forms = tuple(form for form, _ in reading.forms.most_common())
        found.append(
            Source(
                name, prompts, each.weight, forms, reading.num_filtered, reading.num_truncated,
                reading.num_with_tools,
                bool(tokenizer.chat_template) and any(isinstance(p.content, str) for p in prompts),
            )
        )  # fmt: skip
    total = sum(len(source.prompts) for source in found)
    if total < min_rows:
        filtered = sum(source.num_filtered for source in found)
        left_out = f" ({filtered} more are too long and left out)" if filtered else ""
        raise InputError(
            f"{config.describe()}: {total} prompts{left_out}, a step needs {min_rows}; add rows or set "
            "a smaller rollout.prompts_per_step"
        )
    return found


def metric_key(name: str) -> str:
    """Return the text NAME that stands for a source in the metrics `source/NAME/...`. NAME is the
    source's name, with `_` in place of characters that trackers refuse."""
    return _NOT_IN_KEYS.sub("_", name)


def _refuse_same_key(name: str, names: dict[str, str]) -> None:
    """Add the source `name` to `names`, a dict from metric keys to source names. Raises InputError
    if another source has the same metric key."""
    other = names.setdefault(metric_key(name), name)
    if other != name:
        raise InputError(
            f"data.sources: the sources {other!r} and {name!r} would share the metrics "
            f"source/{metric_key(name)}/..., because _ replaces other characters; give one a `name`"
        )


def source_name(source: SourceConfig) -> str:
    """Return the name of a source in messages and checkpoints: its `name`, or if that is None, the
    last part of its first path."""
    return source.name or Path(paths_of(source.path)[0]).name


def read_prompts(
    path: str | Path | DataConfig,
    tokenizer: Any,
    *,
    max_prompt_len: int,
    max_response_len: int = 0,
    min_rows: int = 1,
    is_evaluation: bool = False,
    tasks: Tasks | None = None,
) -> list[Prompt]:
    """Read and tokenize every row of a file, or of all sources of a DataConfig, as one list. The other
    arguments and the errors are those of `read_sources`."""
    config = path if isinstance(path, DataConfig) else DataConfig(path=str(path))
    sources = read_sources(
        config,
        tokenizer,
        max_prompt_len=max_prompt_len,
        max_response_len=max_response_len,
        min_rows=min_rows,
        is_evaluation=is_evaluation,
        tasks=tasks,
    )
    return [prompt for source in sources for prompt in source.prompts]


class _Reading:
    """Reads and tokenizes the prompts of one source. Counts the rows of each form, and the rows
    that are left out, truncated, or have tools."""

    def __init__(
        self,
        encoder: PromptEncoder,
        overlong: str,
        max_prompt_len: int,
        max_response_len: int,
        num_rows: int,
        is_evaluation: bool,
        tasks: Tasks | None,
    ) -> None:
        """`num_rows` is the number of rows already read from other sources. The other arguments are
        those of `read_sources`; `overlong` is `data.overlong`."""
        self._is_evaluation, self._tasks = is_evaluation, tasks
        self._encoder, self._overlong = encoder, overlong
        self._max_len, self._response_len = max_prompt_len, max_response_len
        self.num_rows = num_rows
        self.num_filtered = self.num_truncated = self.num_with_tools = 0
        self.forms: Counter[str] = Counter()

    def prompts(self, config: SourceConfig, name: str | None) -> list[Prompt]:
        """Return the prompts of a source. `name` is the source's name in `Prompt.source_name`; None
        if there is only one source."""
        prompts = []
        reward = None if config.reward is None else describe_rewards(config.reward)
        for row in read_forms(config, self._tasks):
            prompt = self._prompt(row)
            if prompt is not None:
                prompts.append(replace(prompt, reward=reward, source_name=name))
            self.num_rows += 1
            self.forms[row.form] += 1
        return prompts

    def _prompt(self, row: Row) -> Prompt | None:
        is_chat = not isinstance(row.prompt, str)
        tools = tools_of(row.columns, row.source) if is_chat else None
        content, ids = row.prompt, self._encoder.prompt(row.prompt, tools, row.source)
        if len(ids) > self._max_len:
            if self._overlong == "filter":
                self.num_filtered += 1
                return None
            if self._overlong == "refuse":
                raise InputError(self._too_long(row.source, len(ids)))
            content, ids = self._encoder.shortened(content, ids, self._max_len, tools, row.source)
            self.num_truncated += 1
        self.num_with_tools += tools is not None
        return Prompt(str(self.num_rows), torch.tensor(ids), content, row.columns, row.source)

    def _too_long(self, source: str, num_tokens: int) -> str:
        limit, response = self._max_len, self._response_len
        todo = "set data.overlong to filter or truncate_left, or set a smaller rollout.max_response_len"
        if self._is_evaluation:  # filtering would change the set and its metrics
            todo = "leave out the row, or set a smaller max_response_len of the evaluation set"
        return (
            f"{source}: prompt has {num_tokens} tokens, at most {limit} fit (context "
            f"{limit + response} - response {response}); shorten the prompt, {todo} or a larger "
            "rollout.context_len"
        )


def read_sft_examples(
    path: str | Path | DataConfig, tokenizer: Any, *, max_len: int | None = None
) -> list[SftExample]:
    """Read rows that have a completion, and tokenize each row as prompt, completion and
    end-of-sequence token.

    `max_len` is the context in tokens; None sets no limit. Raises InputError if the tokenizer has
    no end-of-sequence token, or if a row is not valid, has no completion or is longer than
    `max_len`.
    """
    config = path if isinstance(path, DataConfig) else DataConfig(path=str(path))
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{config.describe()}: the tokenizer has no end-of-sequence token to learn to stop on"
        )
    encoder = PromptEncoder(tokenizer, config.chat_template_kwargs)
    examples = []
    for row in (row for source in config.all_sources for row in read_forms(source)):
        tools = None if isinstance(row.prompt, str) else tools_of(row.columns, row.source)
        prompt_ids = encoder.prompt(row.prompt, tools, row.source)
        if not row.completion:
            raise InputError(
                f"{row.source}: `completion` must be a string of at least one character, or the last "
                f"message of `messages` an assistant's; this row has {', '.join(row.columns) or 'none'}"
            )
        ids = [*prompt_ids, *encoder.text(row.completion), tokenizer.eos_token_id]
        if max_len is not None and len(ids) > max_len:
            raise InputError(
                f"{row.source}: prompt and completion have {len(ids)} tokens, at most {max_len} fit"
            )
        examples.append(SftExample(torch.tensor(ids), len(prompt_ids), row.source))
    return examples
