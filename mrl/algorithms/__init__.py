"""Finds an algorithm by its name: a file of this folder, or your own file or module.

To add an algorithm, write a module with the three functions of `base.Algorithm`. No registration is
needed.
"""

from __future__ import annotations

from typing import Any, cast

from mrl.algorithms import check
from mrl.algorithms.base import Algorithm, traits
from mrl.config import AlgorithmConfig
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
    "describe",
    "entropy",
    "gae",
    "kl",
    "ratio_loss",
    "signal",
    "value_loss",
)
"""Files of this folder that are not algorithms but code that algorithms share."""
_FUNCTIONS = ("advantages", "sequence_weights", "loss")
_KIND = Kind(
    noun="algorithm.name",
    package="mrl.algorithms",
    not_plugins=frozenset(_PARTS),
    form="object",
)


def list_algorithms() -> list[str]:
    """Return the names of this folder's algorithms, sorted."""
    return _KIND.names()


def load_algorithm(name: str) -> Algorithm:
    """Import an algorithm: a module that has the required functions, or an object in a module (see
    `mrl.system.plugins`).

    Raises InputError if the algorithm does not exist or lacks a function.
    """
    algorithm: Any = resolve(_KIND, name)
    missing = [item for item in _FUNCTIONS if not callable(getattr(algorithm, item, None))]
    if missing:
        raise InputError(
            f"algorithm.name {name!r} lacks {', '.join(missing)}; an algorithm is a module with the "
            f"functions {', '.join(_FUNCTIONS)}, or an object that has them"
        )
    return cast(Algorithm, algorithm)


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise InputError if the algorithm is unknown, or if options are set that it does not read or
    that contradict each other."""
    check.check_algorithm(config, traits(load_algorithm(config.name)))
