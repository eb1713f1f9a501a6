"""Finds the reward function that a recipe names."""

from __future__ import annotations

from mrl.errors import InputError
from mrl.rewards.base import RewardFunction
from mrl.rewards.forms import adapt, split_form
from mrl.system.plugins import Kind, resolve

_PARTS = (
    *("__init__", "answers", "base", "budget", "forms", "judged", "remote", "resolve"),
    *(
        "reward_model",
        "runner",
        "server",
        "terms",
        "trial",
        "trial_cases",
        "worker",
        "worker_calls",
    ),
)
"""Files of this folder that are not rewards."""
_KIND = Kind(
    noun="reward",
    package="mrl.rewards",
    not_plugins=frozenset(_PARTS),
    attributes=("reward",),
    example="func",
)
REWARD_MODEL = "reward_model:"
"""Prefix of a spec that names the folder of a reward model."""
DEFAULT_TIMEOUT_S = 30.0
"""Time limit of one call if the recipe's `reward_timeout_s` is not available."""


def reward_names() -> list[str]:
    """Return the names of the rewards that come with mrl."""
    return _KIND.names()


def resolve_reward(spec: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> RewardFunction:
    """Return the reward function that `spec` names.

    `spec` is `NAME` of mrl/rewards/, `path/file.py:func` or `package.module:func` (see plugins.py).
    Functions written for TRL, verl and slime are adapted (forms.py); the prefix `trl:`, `verl:` or
    `slime:` selects the form if the parameters do not identify it. `spec` may also be the address
    `http(s)://HOST:PORT` of a reward server, or a reward model `reward_model:PATH`. The server is
    not contacted and the model is not loaded here. `timeout_s` is the time limit of one call to a
    reward server.

    Raises InputError if the function is not found, cannot be imported, or is not a reward function,
    or if the address or the model's folder is invalid.
    """
    if spec.lower().startswith(("http://", "https://")):
        from mrl.rewards.remote import HttpReward

        return HttpReward(spec, timeout_s)
    if spec.startswith(REWARD_MODEL):
        from mrl.rewards.reward_model import RewardModel

        return RewardModel(spec)
    if spec == REWARD_MODEL.rstrip(":"):
        raise InputError(
            f"reward {spec!r}: expected reward_model:PATH with the folder of the model"
        )
    form, name = split_form(spec)
    function = resolve(_KIND, name)
    if not callable(function):
        raise InputError(
            f"reward {spec!r} is of type {type(function).__name__}; give the name of a function: "
            "def NAME(prompts, completions, **columns)"
        )
    return adapt(spec, form, function)
