"""What an environment is, and how a recipe names one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, cast

from mrl.errors import InputError
from mrl.system.calls import unaccepted_column, why_not
from mrl.system.plugins import Kind, resolve

_KIND = Kind(
    noun="environment",
    package="mrl.environments",
    not_plugins=frozenset({"__init__", "base", "beside", "episodes", "runner", "worker"}),
    attributes=("Environment",),
    form="class",
    example="Class",
)
RESERVED_COLUMNS = ("prompt", "seed")

Message = dict[str, Any]
"""`role` and `content`, both strings, and what else the chat template reads."""
Observation = str | list[Message]
"""What the policy reads next. A string is one message of role `user`, or, where the prompt is a plain
string, text that is put after the policy's."""


@dataclass(frozen=True)
class StepResult:
    """A `StepResult` is what an environment answers to an action."""

    observation: Observation | None = None
    """May be None only where the episode is done."""
    reward: float = 0.0
    """The reward of this step, finite; an episode's is the sum over its steps."""
    done: bool = False


class Environment(Protocol):
    """An environment is made anew for each episode, with `environment.arguments` as keywords.

    Everything must follow from the prompt, the seed and the actions: where one episode costs a worker
    process, the others that lived there are played again, and are masked if they differ then.

    A method close(), which may be `async`, is optional: it is called once when the episode is over.
    """

    def reset(self, prompt: Any, seed: int, **columns: Any) -> Observation | None:
        """Begin; called once.

        `prompt` is the row's (string or messages), `columns` are the row's others, `answer` and `info`
        among them. `seed` is the same for all samples of a prompt, so that they can be compared, and
        another in each step. Returns what comes after the prompt, or None.
        """
        ...

    def step(self, action: str) -> StepResult:
        """Answer the policy's turn, as text without special tokens. May be `async`."""
        ...


def environment_names() -> list[str]:
    """Return the names of the environments that come with mrl."""
    return _KIND.names()


def resolve_environment(spec: str) -> Callable[..., Environment]:
    """Import `NAME` of mrl/environments/, `path/file.py:Class` or `package.module:Class`.

    Raises InputError, one line: not found, does not import, not an environment.
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
    """Raise InputError if the environment's reset() cannot be called with the columns of a row.

    `source` names the row in the message. A factory that is not a class is not checked.
    """
    factory: Any = resolve_environment(spec)
    reset = inspect.getattr_static(factory, "reset", None) if inspect.isclass(factory) else None
    if not inspect.isfunction(reset):
        return
    if (name := unaccepted_column(reset, 2, columns, is_unbound=True)) is not None:
        raise InputError(
            f"{source}: column {name!r} cannot be given to reset() of the environment {spec!r}: "
            f"{why_not(reset, 2, (name,), is_unbound=True)}; add **columns to it, rename the column "
            f"(data.columns: {{NEW: {name}}}), or leave it out ({{{name}: null}})"
        )
