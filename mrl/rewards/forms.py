"""Takes reward functions in the forms of TRL, verl and slime beside mrl's own.

mrl    `f(prompts, completions, **columns)`; what none of the others is
TRL    `f(completions, **kwargs)`: the first parameter is `completions`
verl   `compute_score(data_source, solution_str, ground_truth, extra_info)`: one is `solution_str`
slime  `custom_rm(args, sample, **kwargs)`: the first two are `args, sample`

`trl:`, `verl:` or `slime:` before the name says it where the parameters do not. TRL and mrl agree on
`f(prompts, completions, **kwargs)`, but where the prompt is messages TRL gives completions as messages
too, and mrl gives texts, as it always did: `trl:` asks for messages.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from mrl.errors import InputError
from mrl.rewards.base import TOTAL, BrokenReward
from mrl.system.calls import unaccepted_column

FORMS = ("trl", "verl", "slime")
TRUTHS = ("ground_truth", "answer", "label")
"""Columns that may hold verl's `ground_truth` and slime's `label`, the first that a row has."""


def split_form(spec: str) -> tuple[str, str]:
    """Return the form that a spec begins with, empty where it has none, and the rest."""
    form, colon, rest = spec.partition(":")
    return (form, rest) if colon and form in FORMS else ("", spec)


def adapt(spec: str, form: str, function: Any) -> Any:
    """Return the function as `RewardFunction` calls it. Raises InputError where its form is unknown."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable without a Python signature
        parameters = None
    names = [p.name for p in parameters or []]
    form = form or _form_of(names)
    if form == "verl":
        return _Verl(function)
    if form == "slime":
        return _Slime(function)
    has_rest = parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not has_rest:
        raise InputError(
            f"reward {spec!r} must take the columns: def {getattr(function, '__name__', 'f')}"
            "(prompts, completions, **columns), or as in TRL (completions, **kwargs)"
        )
    return _Trl(function) if form == "trl" else function


def clashing_column(function: Any, columns: Collection[str]) -> str | None:
    """Return a column with the name of another argument of an adapted reward function; None without
    one.

    A callable object, for instance, has the argument `self`.
    """
    if getattr(function, "takes_rows", False):
        return None
    if not isinstance(function, _Trl):
        return unaccepted_column(function, 2, columns)
    if "trainer_state" in columns:
        return "trainer_state"
    return unaccepted_column(function.__wrapped__, 0, columns, ("prompts", "completions"))


def _form_of(names: list[str]) -> str:
    if names[:1] == ["completions"]:
        return "trl"
    if "solution_str" in names:
        return "verl"
    return "slime" if names[:2] == ["args", "sample"] else ""


class _Trl:
    """Calls by keyword, with messages as completions of prompts that are messages."""

    takes_trainer_state = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = self.__wrapped__ = function

    def __call__(self, prompts: list[Any], completions: list[str], /, **columns: Any) -> Any:
        given = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        return self._function(prompts=prompts, completions=given, **columns)


class _Verl:
    """Calls once a sample, by keyword where the function has verl's names. A dict that comes back has
    the reward under `score`."""

    takes_rows = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = self.__wrapped__ = function
        self._by_name = "solution_str" in inspect.signature(function).parameters

    async def __call__(self, prompts: list[Any], completions: list[str], /, **columns: Any) -> Any:
        calls = []
        for row, text in zip(_rows(columns, len(completions)), completions, strict=True):
            given = {
                "data_source": row.get("data_source", ""),
                "solution_str": text,
                "ground_truth": _truth(row),
                "extra_info": row.get("extra_info") or {},
            }
            by_name = self._by_name
            calls.append(self._function(**given) if by_name else self._function(*given.values()))
        return await _results(calls)


class _Slime:
    """Calls once a sample, with what a run has of slime's `Sample`: `prompt`, `response`,
    `response_length`, `label` and `metadata` (the columns). `args` is empty."""

    takes_rows = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = self.__wrapped__ = function

    async def __call__(self, prompts: list[Any], completions: list[str], /, **columns: Any) -> Any:
        calls = []
        rows = _rows(columns, len(completions))
        for prompt, text, row in zip(prompts, completions, rows, strict=True):
            ids = row.pop("completion_ids", [])
            own = row.get("metadata")
            sample = SimpleNamespace(
                prompt=prompt,
                response=text,
                response_length=len(ids),
                label=_truth(row, is_needed=False),
                metadata=own if isinstance(own, dict) else row,
            )
            calls.append(self._function(SimpleNamespace(), sample))
        return await _results(calls)


async def _results(calls: list[Any]) -> list[Any]:
    """Wait for those that are coroutines, all at once."""
    waiting = [call for call in calls if inspect.isawaitable(call)]
    done = iter(await asyncio.gather(*waiting))
    return [_entry(next(done) if inspect.isawaitable(call) else call) for call in calls]


def _entry(result: Any) -> Any:
    """Return numbers as they are; of a dict the numbers, with `score` as the total."""
    if not isinstance(result, dict):
        return result
    numbers = {k: v for k, v in result.items() if v is None or hasattr(v, "__float__")}
    return {TOTAL if k == "score" else k: v for k, v in numbers.items()}


def _rows(columns: dict[str, list[Any]], size: int) -> list[dict[str, Any]]:
    return [{name: values[i] for name, values in columns.items()} for i in range(size)]


def _truth(row: dict[str, Any], *, is_needed: bool = True) -> Any:
    """Return verl's reward_model.ground_truth, or the first of TRUTHS that the row has."""
    model = row.get("reward_model")
    if isinstance(model, str) and model.startswith("{"):  # parquet files may hold it as JSON
        model = json.loads(model)
    if isinstance(model, dict) and "ground_truth" in model:
        return model["ground_truth"]
    for name in TRUTHS:
        if name in row:
            return row[name]
    if is_needed:
        raise BrokenReward(
            f"the row has no ground truth: expected reward_model.ground_truth, {', '.join(TRUTHS)}; "
            f"its columns are {', '.join(sorted(row))}"
        )
    return None
