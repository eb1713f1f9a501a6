"""What a reward function is, and how a recipe names one."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable
from typing import Any, Protocol

from mrl.errors import InputError
from mrl.system.plugins import Kind, resolve
from mrl.system.processes import START_TIMEOUT_S, JsonWorker, WorkerLost

_NOT_REWARDS = frozenset({"__init__", "base", "runner", "worker", "answers"}) | frozenset(
    {"remote", "server", "reward_model", "trial", "trial_cases"}
)
_KIND = Kind(
    noun="reward",
    package="mrl.rewards",
    not_plugins=_NOT_REWARDS,
    attribute="reward",
    form="function",
    example="func",
)
REWARD_MODEL = "reward_model:"
"""What a spec begins with that names the folder of a reward model."""
DEFAULT_TIMEOUT_S = 30.0
"""Of one call, where nothing else is said; the recipe says `reward_timeout_s`."""
MODEL_START_TIMEOUT_S = 1800.0
"""For reading a reward model."""
HANG = "hang"
"""The kind of a call without an answer; the others are below."""


class RewardError(ValueError):
    """The function gave no usable rewards."""

    kind = "exception"
    """What `mrl reward test` files it under."""


class BrokenReward(RewardError):
    """No answer for each completion: scoring fewer at a time would hide it, or not help."""

    kind = "wrong type or length"


class NotANumber(RewardError):
    """One entry is neither a number nor None."""

    kind = "not a number"


class NotFinite(RewardError):
    """One entry is NaN or infinite, or would be as a float32."""

    kind = "NaN or infinite"


class RewardFunction(Protocol):
    def __call__(
        self, prompts: list[Any], completions: list[str], **columns: list[Any]
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Score the G completions of one prompt.

        `prompts` repeats the row's prompt (string or messages) G times; so does each of
        `columns` with its own value. `columns["completion_ids"]` holds the G lists of token ids.
        Returns G finite numbers, or None where the function abstains. May be called again for
        single samples (G = 1) when a call fails: it must not depend on the rest of the group.

        What has a method `start_worker()`, with no arguments, has it called once in the worker process
        before the first call: for what takes long or must not be loaded in the trainer.
        """
        ...


def reward_names() -> list[str]:
    """The rewards that come with mrl."""
    return _KIND.names()


def resolve_reward(spec: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> RewardFunction:
    """Import `NAME` of mrl/rewards/, `path/file.py:func` or `package.module:func`.

    `http(s)://HOST:PORT` is a reward server, `reward_model:PATH` a reward model; neither is reached
    or loaded here. `timeout_s` is that of one call, for the server's client.

    Raises InputError, one line: not found, does not import, not a reward function.
    """
    if spec.lower().startswith(("http://", "https://")):
        from mrl.rewards.remote import HttpReward

        return HttpReward(spec, timeout_s)
    if spec.startswith(REWARD_MODEL):
        from mrl.rewards.reward_model import RewardModel

        return RewardModel(spec)
    if spec == REWARD_MODEL.rstrip(":"):
        raise InputError(f"reward {spec!r}: which one? reward_model:PATH names its folder")
    function = resolve(_KIND, spec)
    _check_signature(spec, function)
    return function


def reward_worker(spec: str, timeout_s: float) -> JsonWorker:
    """The process that calls the function, not yet started: `mrl.rewards.worker`."""
    is_model = spec.startswith(REWARD_MODEL)
    return JsonWorker(
        "mrl.rewards.worker",
        f"reward {spec!r}",
        spec,
        repr(timeout_s),
        start_timeout_s=MODEL_START_TIMEOUT_S if is_model else START_TIMEOUT_S,
    )


def call_worker(worker: JsonWorker, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Its answer as `mrl.rewards.worker` gives it; also where it hung or died, and is gone."""
    start = time.monotonic()
    try:
        return worker.call(request, timeout_s)
    except WorkerLost as error:
        kind = HANG if time.monotonic() - start >= timeout_s else RewardError.kind
        return {"error": str(error), "broken": False, "kind": kind}


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
