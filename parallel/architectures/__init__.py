"""Finds model architectures by the `model_type` of a Hugging Face config.json: MODEL_TYPE.py."""

from __future__ import annotations

from mrl.system.plugins import Kind, resolve_builtin
from parallel.architectures.base import Architecture

_KIND = Kind(
    noun="config.json: model_type",
    package="parallel.architectures",
    not_plugins=frozenset({"__init__", "base", "common"}),
    attributes=("ARCHITECTURE",),
    form="object",
)


def architectures() -> list[str]:
    """Return the model types of this folder, sorted."""
    return _KIND.names()


def load_architecture(model_type: str) -> Architecture:
    """Return the architecture of a `model_type`. Raises InputError that lists the supported ones.

    A config.json comes with downloaded weights, so it names files of this folder and no other code.
    """
    return resolve_builtin(_KIND, model_type)
