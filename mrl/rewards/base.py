"""What a reward function is, and how a recipe names one."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import Any, Protocol

from mrl.errors import InputError
from mrl.plugins import Kind, resolve

_KIND = Kind(
    noun="reward",
    package="mrl.rewards",
    not_plugins=frozenset({"__init__", "base", "runner", "worker"}),
    attribute="reward",
    form="function",
    example="func",
)


class RewardFunction(Protocol):
    def __call__(
        self, prompts: list[Any], completions: list[str], **columns: list[Any]
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Score the G completions of one prompt.

        `prompts` repeats the row's prompt (string or messages) G times; so does each of
        `columns` with its own value. `columns["completion_ids"]` holds the G lists of token ids.
        Returns G finite numbers, or None where the function abstains. May be called again for
        single samples (G = 1) when a call fails: it must not depend on the rest of the group.
        """
        ...


def reward_names() -> list[str]:
    """The rewards that come with mrl."""
    return _KIND.names()


def resolve_reward(spec: str) -> RewardFunction:
    """Import `NAME` of mrl/rewards/, `path/file.py:func` or `package.module:func`.

    Raises InputError, one line: not found, does not import, not a reward function.
    """
    function = resolve(_KIND, spec)
    _check_signature(spec, function)
    return function


def _check_signature(spec: str, function: Any) -> None:
    if not callable(function):
        raise InputError(f"reward {spec!r} is a {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable without a Python signature
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise InputError(
            f"reward {spec!r} must take the columns: def {getattr(function, '__name__', 'f')}"
            "(prompts, completions, **columns)"
        )
