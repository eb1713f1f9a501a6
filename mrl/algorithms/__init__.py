"""Algorithms by name: a file of this folder, or `package.module` from outside.

To add one, write a module with the three functions of `base.Algorithm`; nothing is registered.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import cast

from mrl.algorithms import check
from mrl.algorithms.base import Algorithm, traits
from mrl.config import AlgorithmConfig
from mrl.errors import InputError

__all__ = ["Algorithm", "check_algorithm", "list_algorithms", "load_algorithm", "traits"]

_PARTS = (
    "__init__",
    "advantages",
    "aggregation",
    "base",
    "check",
    "corrections",
    "gae",
    "kl",
    "ratio_loss",
    "signal",
    "value_loss",
)
"""Files of this folder that are no algorithms: what these share."""
_FUNCTIONS = ("advantages", "sequence_weights", "loss")


def list_algorithms() -> list[str]:
    """Names of this folder's algorithms, sorted."""
    files = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(name for name in files if name not in _PARTS)


def load_algorithm(name: str) -> Algorithm:
    """The module called `name`.

    Raises InputError when there is none, or when it lacks a function.
    """
    known = list_algorithms()
    path = f"mrl.algorithms.{name}" if name in known else name
    if name not in known and "." not in name:
        raise InputError(_unknown(name, known))
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise InputError(_unknown(name, known)) from None
    except (TypeError, ValueError):  # a name like `.gspo` or `a..b`
        raise InputError(_unknown(name, known)) from None
    missing = [item for item in _FUNCTIONS if not callable(getattr(module, item, None))]
    if missing:
        raise InputError(
            f"algorithm.name: module {path} lacks {', '.join(missing)}; an algorithm is a module "
            f"with the functions {', '.join(_FUNCTIONS)}"
        )
    return cast(Algorithm, module)


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise InputError for an unknown name, and for options that make no sense together."""
    check.check_algorithm(config, traits(load_algorithm(config.name)))


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"algorithm.name: got {name!r}, expected one of {', '.join(known)}, or package.module from "
        f"outside{hint}"
    )
