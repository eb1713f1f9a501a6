"""RL algorithms, loaded by name: the modules of this package, or a file or module of the user.

To add an algorithm, write a module with the three functions of `base.Algorithm`. It need not be
registered.
"""

from __future__ import annotations

from typing import Any, cast

from mrl.algorithms import check
from mrl.algorithms.base import Algorithm, traits
from mrl.config import AlgorithmConfig
from mrl.config.foreign import advice_for_algorithm
from mrl.errors import InputError
from mrl.system.plugins import Kind, resolve

__all__ = ["Algorithm", "check_algorithm", "list_algorithms", "load_algorithm", "traits"]

_PARTS = (
    "__init__",
    "advantages",
    "aggregation",
    "base",
    "check",
    "corrections",
    "episodes",
    "describe",
    "entropy",
    "gae",
    "kl",
    "logprob_pass",
    "ratio_loss",
    "router_shift",
    "signal",
    "value_loss",
)
"""Modules of this package that are not algorithms: they hold code that algorithms share."""
_FUNCTIONS = ("advantages", "sequence_weights", "loss")
_KIND = Kind(
    noun="algorithm.name",
    package="mrl.algorithms",
    not_plugins=frozenset(_PARTS),
    form="object",
)


def list_algorithms() -> list[str]:
    """Return the sorted names of the algorithms in this package."""
    return _KIND.names()


def load_algorithm(name: str) -> Algorithm:
    """Import an algorithm: a module with the functions of `Algorithm`, or an object in a module that
    has these functions as methods.

    name: a module of this package, such as `gspo`; the path or the dotted name of another module;
    or such a path or dotted name followed by `:OBJECT` (see `mrl.system.plugins.resolve`).

    Raises InputError if the algorithm cannot be imported or lacks a function.
    """
    if pointer := advice_for_algorithm(name):
        raise InputError(f"algorithm.name {name!r}: mrl has none of this name; {pointer}")
    algorithm: Any = resolve(_KIND, name)
    missing = [item for item in _FUNCTIONS if not callable(getattr(algorithm, item, None))]
    if missing:
        raise InputError(
            f"algorithm.name {name!r} lacks {', '.join(missing)}; an algorithm is a module with the "
            f"functions {', '.join(_FUNCTIONS)}, or an object that has them"
        )
    return cast(Algorithm, algorithm)


def check_algorithm(config: AlgorithmConfig) -> None:
    """Check the `algorithm` section of a recipe.

    Raises InputError if the algorithm cannot be loaded or does not read an option that is set, or
    if an option is out of range or contradicts another option.
    """
    check.check_algorithm(config, traits(load_algorithm(config.name)))
