"""Finds the reward function that a recipe names."""

from __future__ import annotations

from mrl.errors import InputError
from mrl.rewards.base import RewardFunction
from mrl.rewards.forms import adapt, split_form
from mrl.system.plugins import Kind, resolve

_PARTS = ("__init__", "answers", "base", "budget", "forms", "remote", "resolve", "reward_model",
          "runner", "server", "terms", "trial", "trial_cases", "worker", "worker_calls")  # fmt: skip
"""Files of this folder that are no rewards."""
_KIND = Kind(
    noun="reward",
    package="mrl.rewards",
    not_plugins=frozenset(_PARTS),
    attributes=("reward",),
    example="func",
)
REWARD_MODEL = "reward_model:"
"""What a spec begins with that names the folder of a reward model."""
DEFAULT_TIMEOUT_S = 30.0
"""The time limit of one call where the recipe's `reward_timeout_s` is not at hand."""


def reward_names() -> list[str]:
    """Return the names of the rewards that come with mrl."""
    return _KIND.names()


def resolve_reward(spec: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> RewardFunction:
    """Import `NAME` of mrl/rewards/, `path/file.py:func` or `package.module:func`; see plugins.py.

    Functions of TRL, verl and slime are adapted (forms.py); `trl:`, `verl:` or `slime:` before the name
    says whose it is where its parameters do not.
    `http(s)://HOST:PORT` is a reward server, `reward_model:PATH` a reward model; neither is reached
    or loaded here. `timeout_s` is the time limit of one call to a reward server.

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
    form, name = split_form(spec)
    function = resolve(_KIND, name)
    if not callable(function):
        raise InputError(f"reward {spec!r} is a {type(function).__name__}, not a function")
    return adapt(spec, form, function)
