"""What a reward function is, and how a recipe names one."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from mrl.errors import InputError

_NOT_REWARDS = {"__init__", "base", "runner", "worker"}


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
    files = Path(__file__).parent.glob("*.py")
    return sorted(file.stem for file in files if file.stem not in _NOT_REWARDS)


def resolve_reward(spec: str) -> RewardFunction:
    """Import `NAME` of mrl/rewards/, `path/file.py:func` or `package.module:func`.

    Raises InputError, one line: not found, does not import, not a reward function.
    """
    target, colon, name = spec.rpartition(":")
    if not colon:
        module, name = _builtin(spec), "reward"
    elif not target or not name:
        raise InputError(f"reward {spec!r}: expected NAME, path/file.py:func or module:func")
    elif target.endswith(".py") or "/" in target:
        module = _load(spec, lambda: _from_file(spec, Path(target)))
    else:
        module = _load(spec, lambda: importlib.import_module(target))
    function = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"reward {spec!r}: no function {name!r} in it{hint}")
    _check_signature(spec, function)
    return function


def _builtin(spec: str) -> ModuleType:
    names = reward_names()
    if spec not in names:
        near = difflib.get_close_matches(spec, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise InputError(
            f"reward {spec!r} is not a file of mrl/rewards/; {hint} "
            "(your own: path/file.py:func or package.module:func)"
        )
    return _load(spec, lambda: importlib.import_module(f"mrl.rewards.{spec}"))


def _from_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"reward {spec!r}: no file {path}")
    loader = importlib.util.spec_from_file_location(f"mrl_reward_{path.stem}", path)
    if loader is None or loader.loader is None:
        raise InputError(f"reward {spec!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module  # dataclasses and typing look their module up here
    sys.path.append(str(path.resolve().parent))  # last: its neighbours import, and shadow nothing
    loader.loader.exec_module(module)
    return module


def _load(spec: str, load: Any) -> ModuleType:
    try:
        return load()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # user code at import: anything can happen
        message = " ".join(str(error).split())
        raise InputError(
            f"reward {spec!r} does not import: {type(error).__name__}: {message}"
        ) from None


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
