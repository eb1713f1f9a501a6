"""Finds model architectures: MODEL_TYPE.py by the `model_type` of a Hugging Face config.json, or what
the recipe names as `model.architecture`."""

from __future__ import annotations

from dataclasses import replace

from mrl.system.plugins import Kind, resolve, resolve_builtin
from parallel.architectures.base import Architecture, HfConfig
from parallel.architectures.contract import check_contract, check_object

_KIND = Kind(
    noun="config.json: model_type",
    package="parallel.architectures",
    not_plugins=frozenset({"__init__", "base", "common", "contract"}),
    attributes=("ARCHITECTURE",),
    form="object",
    example="ARCHITECTURE",
)
_NAMED = replace(_KIND, noun="model.architecture")


def architectures() -> list[str]:
    """Return the model types of this folder, sorted."""
    return _KIND.names()


def load_architecture(model_type: str) -> Architecture:
    """Return the architecture of a `model_type`. Raises InputError that lists the supported ones.

    A config.json comes with downloaded weights, so it names files of this folder and no other code.
    """
    own = "give your own with model.architecture=path/file.py (docs/architecture.md)"
    return resolve_builtin(_KIND, model_type, own)


def find_architecture(config: HfConfig, named: str | None = None) -> Architecture:
    """Return the architecture that the recipe names as `model.architecture`, or else that of the
    `model_type` of `config`, a parsed config.json.

    Raises InputError where there is none, or where one from outside breaks the contract of `base`.
    """
    if named is None:
        return load_architecture(str(config.get("model_type") or ""))
    found = check_object(named, resolve(_NAMED, named))
    if named not in architectures():
        check_contract(named, found, config)
    return found
