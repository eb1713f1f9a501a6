"""Find a model's architecture by `model_type` of config.json, or by the recipe's `model.architecture`.

Each supported `model_type` has a file of that name in this folder.
"""

from __future__ import annotations

from dataclasses import replace

from mrl.system.plugins import Kind, resolve, resolve_builtin
from parallel.architectures.base import Architecture, HfConfig
from parallel.architectures.contract import check_contract, check_object

_KIND = Kind(
    noun="config.json: model_type",
    package="parallel.architectures",
    not_plugins=frozenset({"__init__", "base", "common", "contract", "deepseek_moe", "mtp"}),
    attributes=("ARCHITECTURE",),
    form="object",
    example="ARCHITECTURE",
)
_NAMED = replace(_KIND, noun="model.architecture")


def architectures() -> list[str]:
    """Return the sorted model types for which this folder has a file."""
    return _KIND.names()


def load_architecture(model_type: str) -> Architecture:
    """Return the architecture of a `model_type`.

    Only files of this folder are accepted, because config.json comes with downloaded weights and
    must not name other code. For any other type, raises an InputError that lists the supported ones.
    """
    own = "give your own with model.architecture=path/file.py (docs/architecture.md)"
    return resolve_builtin(_KIND, model_type, own)


def find_architecture(config: HfConfig, named: str | None = None) -> Architecture:
    """Return the architecture `named`, which is the recipe's `model.architecture`. If `named` is
    None, return the architecture for the `model_type` of `config`, a parsed config.json.

    Raises InputError if there is no such architecture, or if a user's own architecture does not
    fulfil the contract in `parallel.architectures.base`.
    """
    if named is None:
        return load_architecture(str(config.get("model_type") or ""))
    found = check_object(named, resolve(_NAMED, named))
    if named not in architectures():
        check_contract(named, found, config)
    return found
