"""The interface of an environment, and a function that imports the environment a recipe names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mrl.errors import InputError
from mrl.system.calls import unaccepted_column, why_not
from mrl.system.plugins import Kind, resolve

_KIND = Kind(
    noun="environment",
    package="mrl.environments",
    not_plugins=frozenset(
        {"__init__", "base", "calls", "command", "episode_worker", "episodes", "runner", "worker"}
    ),
    attributes=("Environment",),
    form="class",
    example="Class",
)
RESERVED_COLUMNS = ("prompt", "seed")

Message = dict[str, Any]
"""A chat message: the strings `role` and `content`, and any other keys that the chat template
reads."""
Observation = str | list[Message]
"""The string or messages that the policy reads next. If the prompt is a list of messages, an
observation that is a string becomes a message of role `user`. If the prompt is a string, the
observation must be a string, which is appended to the policy's text."""


@dataclass(frozen=True)
class StepResult:
    """What an environment returns after one turn of the policy."""

    observation: Observation | None = None
    """What the policy reads next. It may be None only if the episode is done."""
    reward: float = 0.0
    """The reward of this turn, which must be finite. The reward of an episode is the sum over
    its turns."""
    done: bool = False


class Environment(Protocol):
    """An environment of multi-turn rollouts.

    Each episode creates an instance, with `environment.arguments` as keyword arguments. The answers
    of an instance must depend only on the prompt, the seed and the actions. The reason is that an
    episode may kill its worker process. The other episodes of that process are then replayed in a
    new process: their actions are sent again. An episode that gives other answers when it is
    replayed has failed and is masked.

    A method close(), which may be `async`, is optional. It is called once when the episode is over.
    """

    def reset(self, prompt: Any, seed: int, **columns: Any) -> Observation | None:
        """Begin the episode. This method is called once per episode.

        `prompt` is the row's prompt (string or messages), and `columns` are the row's other
        columns, such as `answer` and `info`. All samples of a prompt in one step have the same
        `seed`, so that they can be compared; the seed changes from step to step. Returns an
        observation that follows the prompt, or None.
        """
        ...

    def step(self, action: str) -> StepResult:
        """Answer the policy's turn `action`, a string without special tokens. May be `async`."""
        ...


def environment_names() -> list[str]:
    """Return the names of the environments that come with mrl."""
    return _KIND.names()


def resolve_environment(spec: str) -> Callable[..., Environment]:
    """Import and return the class of an environment, or a function that creates an environment.

    `spec` is the NAME of a file in mrl/environments/, `path/file.py:Class` or
    `package.module:Class`.

    Raises InputError if `spec` is not found, cannot be imported, or is not an environment.
    """
    factory: Any = resolve(_KIND, spec)
    if not callable(factory):
        raise InputError(f"environment {spec!r} is a {type(factory).__name__}, not a class")
    if inspect.isclass(factory):
        for method in ("reset", "step"):
            if not callable(getattr(factory, method, None)):
                raise InputError(
                    f"environment {spec!r} has no method {method}(); expected reset(prompt, seed, "
                    "**columns) and step(action)"
                )
    return cast(Callable[..., Environment], factory)


def check_reset(spec: str, columns: Collection[str], source: str) -> None:
    """Raise InputError if the environment's reset() cannot be called with the columns of a row, or
    needs another one.

    `source` names the row in the message. An environment that is created by a function instead of a
    class is not checked.
    """
    factory: Any = resolve_environment(spec)
    reset = inspect.getattr_static(factory, "reset", None) if inspect.isclass(factory) else None
    if not inspect.isfunction(reset):
        return
    if (name := unaccepted_column(reset, 2, columns, is_unbound=True)) is not None:
        raise InputError(
            f"{source}: column {name!r} cannot be passed to reset() of the environment {spec!r}: "
            f"{why_not(reset, 2, (name,), is_unbound=True)}; add **columns to it, rename the column "
            f"(data.columns: {{NEW: {name}}}), or leave it out ({{{name}: null}})"
        )
    for name in _needed_columns(reset):
        if name not in columns:
            raise InputError(
                f"{source}: no column `{name}`, which reset() of the environment {spec!r} needs; this "
                f"row has {', '.join(columns) or 'no column but the prompt'}; name the column that "
                f"holds it: data.columns: {{{name}: NAME}}"
            )


def check_arguments(spec: str, arguments: Mapping[str, Any]) -> None:
    """Raise InputError if the environment does not accept these `environment.arguments`, or needs
    others. The environment is not created."""
    factory: Any = resolve_environment(spec)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a class of C has none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        accepted = ", ".join(str(each) for each in signature.parameters.values()) or "none"
        raise InputError(
            f"environment {spec!r} cannot be created with environment.arguments "
            f"{dict(arguments)}: {error}; its arguments are: {accepted}"
        ) from None


def _needed_columns(reset: Callable[..., Any]) -> list[str]:
    """Return the arguments of an unbound reset(), beside `prompt` and `seed`, without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _self, *parameters = inspect.signature(reset).parameters.values()
    positional = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    given = {parameter.name for parameter in positional[:2]}
    return [
        p.name
        for p in parameters
        if p.kind in kinds and p.default is p.empty and p.name not in given
    ]
