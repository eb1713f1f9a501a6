"""Reads rows of prompt files in their common form, without a tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.config import SourceConfig
from mrl.config.data import paths_of
from mrl.data.files import Tasks, read_all_rows
from mrl.data.forms import Row, read_form


def read_prompt_rows(
    path: str | Path, prompt_key: str | None = None, columns: dict[str, str | None] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(source, row)` for every row of a file. `source` names the row in messages. `row` is a
    dict with `prompt` in the common form (`Row.prompt`) and the other columns. `prompt_key` and
    `columns` are those of `data` in a recipe. Raises InputError for a bad row."""
    config = SourceConfig(path=str(path), prompt_key=prompt_key, columns=columns or {})
    for row in read_forms(config):
        yield row.source, {"prompt": row.prompt, **row.columns}


def read_forms(config: SourceConfig, tasks: Tasks | None = None) -> Iterator[Row]:
    """Yield the rows of a source. `tasks` loads the tasks of the recipe's environment, for the path
    ENVIRONMENT_TASKS. Raises InputError for a bad row."""
    rows = read_all_rows(
        paths_of(config.path),
        split=config.split or "train",
        subset=config.subset,
        tasks=None if tasks is None else functools.partial(tasks, config.arguments),
    )
    for source, values in rows:
        yield read_form(source, values, config.prompt_key, config.columns)
