"""Adapters for reward functions written for TRL, verl and slime.

The names of the parameters identify the form:

TRL    `f(completions, **kwargs)`: the first parameter is `completions`
verl   `compute_score(data_source, solution_str, ground_truth, extra_info)`: one parameter is
       `solution_str`
slime  `custom_rm(args, sample, **kwargs)`: the first two parameters are `args, sample`
mrl    `f(prompts, completions, **columns)`: any function that has none of the other forms

A prefix `trl:`, `verl:` or `slime:` of the name selects the form if the parameters do not identify
it. For example, the signature `f(prompts, completions, **kwargs)` is valid in both TRL and mrl. If
the prompt is a list of messages, TRL also passes completions as messages, while mrl passes strings;
with the prefix `trl:` the function gets messages.
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
"""Columns that can be verl's `ground_truth` and slime's `label`. If a row has several of these
columns, the first in this order is used."""


def split_form(spec: str) -> tuple[str, str]:
    """Split the name of a reward into (form, rest): `trl:f.py:func` into (`trl`, `f.py:func`).

    The form is empty if the name has no such prefix.
    """
    form, colon, rest = spec.partition(":")
    return (form, rest) if colon and form in FORMS else ("", spec)


def adapt(spec: str, form: str, function: Any) -> Any:
    """Return `function`, adapted to the interface of `RewardFunction`.

    `form` is one of FORMS, or empty to infer the form from the parameters. Raises InputError if a
    function in the form of TRL or mrl does not accept all columns as keyword arguments.
    """
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
            f"reward {spec!r} must accept the columns: def {getattr(function, '__name__', 'f')}"
            "(prompts, completions, **columns), or as in TRL (completions, **kwargs)"
        )
    return _Trl(function) if form == "trl" else function


def clashing_column(function: Any, columns: Collection[str]) -> str | None:
    """Return the first column that cannot be passed to `function`, because `function` has another
    argument of the same name; None if there is no such column.

    `function` is a result of `adapt`. For example, a column `self` clashes if `function` is a
    callable object, whose method has the argument `self`. Functions in the forms of verl and slime
    get a row as a dict, so no column clashes.
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
    """Calls a TRL function with keyword arguments.

    If a prompt is a list of messages, the completion of that prompt is also passed as messages.
    """

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
    """Calls a verl function once per sample. If the result is a dict, its `score` is the reward.

    The function gets keyword arguments if one of its parameters is named `solution_str`, and
    positional arguments otherwise.
    """

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
    """Calls a slime function once per sample, with an empty `args`.

    The argument `sample` has the attributes of slime's `Sample` that mrl knows: `prompt`,
    `response`, `response_length` in tokens, `label` (the ground truth or None) and `metadata`.
    `metadata` is the column of that name if the column is a dict, and otherwise a dict of all
    columns.
    """

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
    """Return one `Entry` for each of `calls`. An element of `calls` is a function's return value,
    or an awaitable that gives it.

    Awaitables are awaited concurrently.
    """
    waiting = [call for call in calls if inspect.isawaitable(call)]
    done = iter(await asyncio.gather(*waiting))
    return [_entry(next(done) if inspect.isawaitable(call) else call) for call in calls]


def _entry(result: Any) -> Any:
    """Convert the result of a verl or slime function to an `Entry`.

    Of a dict, only values that are numbers or None are kept, and `score` is renamed to `total`. Any
    other result is returned unchanged.
    """
    if not isinstance(result, dict):
        return result
    numbers = {k: v for k, v in result.items() if v is None or hasattr(v, "__float__")}
    return {TOTAL if k == "score" else k: v for k, v in numbers.items()}


def _rows(columns: dict[str, list[Any]], size: int) -> list[dict[str, Any]]:
    return [{name: values[i] for name, values in columns.items()} for i in range(size)]


def _truth(row: dict[str, Any], *, is_needed: bool = True) -> Any:
    """Return the ground truth of a row.

    It is `ground_truth` in the row's `reward_model`, as in verl's data, or else the first of the
    columns TRUTHS that the row has. If the row has no ground truth, return None, or raise
    BrokenReward if `is_needed`.
    """
    model = row.get("reward_model")
    if isinstance(model, str) and model.startswith(
        "{"
    ):  # parquet files may contain it as JSON text
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
