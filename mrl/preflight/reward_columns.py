"""Finds rows without the columns that their reward needs."""

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
    """Check every prompt against `reward`, or against the reward of its own source.

    `of_sources` is `DataConfig.rewards`. Where not `imports_rewards`, only mrl's own are asked what
    they need.

    Raises InputError that names the first row, its columns, and how many rows are like it, and for a
    column whose name the function's call needs for itself. `warn(text)`
    names the first null, for which mrl's own rewards give none; a column of nothing else is refused for
    them.
    """
    needed: dict[str, list[str]] = {}
    functions: dict[str, RewardFunction | None] = {}
    fit: set[tuple[str, ...]] = set()
    """The rewards, with the columns that they were found to accept."""
    missing: dict[tuple[str, str], list[Prompt]] = {}
    empty: dict[tuple[str, str], list[Prompt]] = {}
    specs = {key: [term.path for term in terms_of(own)] for key, own in of_sources.items()}
    whole = [] if reward is None else [term.path for term in terms_of(reward)]
    num_prompts = 0
    for prompt in prompts:
        num_prompts += 1
        for spec in whole if prompt.reward is None else specs[prompt.reward]:
            if spec not in needed:
                is_asked = imports_rewards or spec in reward_names()
                needed[spec] = needed_columns(spec) if is_asked else []
                functions[spec] = resolve_reward(spec) if is_asked else None
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
        gets = "such rows have no reward and train nothing" if is_own else "the reward gets None"
        warn(f"{text}: {gets}; leave them out unless that is meant")


def _refuse_clash(prompt: Prompt, spec: str, function: RewardFunction | None) -> None:
    if (name := clashing_column(function, prompt.columns)) is not None:
        raise InputError(
            f"{prompt.source}: column {name!r} is a name that the call of the reward {spec!r} needs; "
            f"rename it (data.columns: {{NEW: {name}}}), or leave it out ({{{name}: null}})"
        )


def is_not_finite(value: object) -> bool:
    """Return whether a column holds NaN or an infinity, in itself or in what it holds."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(is_not_finite(inner) for inner in value.values())
    return isinstance(value, list) and any(is_not_finite(inner) for inner in value)


def needed_columns(spec: str) -> list[str]:
    """Return the columns that a reward function cannot do without: its arguments without default.

    Functions in the forms of verl and slime take whole rows, and have none.
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
