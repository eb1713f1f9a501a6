"""Check that each row of the data has the columns that its reward needs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from mrl.config import RewardConfig
from mrl.errors import InputError
from mrl.rewards import RewardFunction, resolve_reward, reward_names
from mrl.rewards.forms import clashing_column
from mrl.rewards.terms import terms_of
from mrl.types import Prompt

_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")
"""Arguments of a reward function that are not columns."""


def check_reward_columns(
    prompts: Iterable[Prompt],
    reward: str | Sequence[RewardConfig] | None,
    of_sources: Mapping[str, str | Sequence[RewardConfig]],
    warn: Callable[[str], None] = lambda text: None,
    *,
    imports_rewards: bool = True,
) -> None:
    """Check that every prompt has the columns that its rewards need.

    A prompt is scored with `reward`, or with the reward of its data source if the source has one.
    `of_sources` holds the rewards of the sources (`DataConfig.rewards`). If `imports_rewards` is
    false, only mrl's own rewards are imported, and prompts are not checked against any other
    reward.

    Raises InputError

    - if a needed column is missing in a row; the message names the first such row, the columns that the
      row has, and the number of such rows;
    - if a needed column is NaN or infinite in a row;
    - if a needed column of one of mrl's own rewards is null in all rows;
    - if a column has the same name as another argument of the reward function's calls.

    If a needed column is null in some rows (or, for a user's reward, in some or all rows),
    `warn(text)` is called, and the text names the first such row. One of mrl's own rewards then
    gives no reward for these rows, and a user's reward is called with None.
    """
    needed: dict[str, list[str]] = {}
    functions: dict[str, RewardFunction | None] = {}
    fit: set[tuple[str, ...]] = set()
    """Tuples (reward, column name, column name, ...) for which it was already checked that no
    column has the name of another argument of the reward function."""
    missing: dict[tuple[str, str], list[Prompt]] = {}
    empty: dict[tuple[str, str], list[Prompt]] = {}
    specs = {key: [term.path for term in terms_of(each)] for key, each in of_sources.items()}
    whole = [] if reward is None else [term.path for term in terms_of(reward)]
    num_prompts = 0
    for prompt in prompts:
        num_prompts += 1
        for spec in whole if prompt.reward is None else specs[prompt.reward]:
            if spec not in needed:
                is_imported = imports_rewards or spec in reward_names()
                needed[spec] = needed_columns(spec) if is_imported else []
                functions[spec] = resolve_reward(spec) if is_imported else None
            shape = (spec, *prompt.columns)
            if shape not in fit and functions[spec] is not None:
                fit.add(shape)
                _refuse_clash(prompt, spec, functions[spec])
            for name in needed[spec]:
                if name not in prompt.columns:
                    missing.setdefault((spec, name), []).append(prompt)
                elif prompt.columns[name] is None:
                    empty.setdefault((spec, name), []).append(prompt)
                elif is_not_finite(value := prompt.columns[name]):
                    raise InputError(
                        f"{prompt.source}: the column `{name}`, which the reward {spec!r} needs, is "
                        f"{value}; give the row a value, or leave it out"
                    )
    _refuse_missing(missing, num_prompts)
    _judge_empty(empty, num_prompts, warn)


def _refuse_missing(missing: Mapping[tuple[str, str], list[Prompt]], num_prompts: int) -> None:
    for (spec, name), rows in missing.items():
        first = rows[0]
        raise InputError(
            f"{first.source}: no column `{name}`, which the reward {spec!r} needs; this row has "
            f"{', '.join(first.columns) or 'no column but the prompt'} ({len(rows)} of {num_prompts} "
            f"rows are without `{name}`); name the column that holds it: data.columns: {{{name}: NAME}}"
        )


def _judge_empty(
    empty: Mapping[tuple[str, str], list[Prompt]], num_prompts: int, warn: Callable[[str], None]
) -> None:
    for (spec, name), rows in empty.items():
        text = (
            f"{rows[0].source}: the column `{name}`, which the reward {spec!r} needs, is null "
            f"({len(rows)} of {num_prompts} rows)"
        )
        is_own = spec in reward_names()
        if is_own and len(rows) == num_prompts:
            raise InputError(
                f"{text}, so nothing has a reward; name the column that holds it: "
                f"data.columns: {{{name}: NAME}}"
            )
        gets = "such rows have no reward and are masked" if is_own else "the reward gets None"
        warn(f"{text}: {gets}; leave them out unless this is intended")


def _refuse_clash(prompt: Prompt, spec: str, function: RewardFunction | None) -> None:
    if (name := clashing_column(function, prompt.columns)) is not None:
        raise InputError(
            f"{prompt.source}: column {name!r} has the name of another argument of the reward "
            f"{spec!r}; rename it (data.columns: {{NEW: {name}}}), or leave it out ({{{name}: null}})"
        )


def is_not_finite(value: object) -> bool:
    """Return whether a value is NaN or infinite, or a list or dict that contains such a value."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(is_not_finite(inner) for inner in value.values())
    return isinstance(value, list) and any(is_not_finite(inner) for inner in value)


def needed_columns(spec: str) -> list[str]:
    """Return the columns that a reward function requires: its arguments without a default.

    The list is empty for functions in the forms of verl and slime, which take complete rows, and
    for a callable without a Python signature.
    """
    try:
        function = resolve_reward(spec)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable without a Python signature
        return []
    if getattr(function, "takes_rows", False):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in named
        and parameter.default is parameter.empty
        and parameter.name not in _GIVEN
    ]
