"""Finds algorithms by name: a file of this folder, or a file or module from outside.

To add one, write a module with the three functions of `base.Algorithm`; nothing is registered.
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
"""Files of this folder that are no algorithms: what these share."""
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
    """Import an algorithm: a module, or an object of one, with its functions; see plugins.py.

    Raises InputError when there is none, or when it lacks a function.
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
    """Raise InputError for an unknown name, and for options that make no sense together."""
    check.check_algorithm(config, traits(load_algorithm(config.name)))
