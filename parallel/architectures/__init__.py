"""One file a model architecture, found by the `model_type` of a Hugging Face config.json."""

from __future__ import annotations

import importlib
import pkgutil

from mrl.errors import InputError
from parallel.architectures.base import Architecture


def architectures() -> dict[str, Architecture]:
    """Every architecture of this folder by model_type: its modules that have an `ARCHITECTURE`."""
    modules = (
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    )
    found = [m.ARCHITECTURE for m in modules if hasattr(m, "ARCHITECTURE")]
    return {architecture.model_type: architecture for architecture in found}


def load_architecture(model_type: str) -> Architecture:
    """The architecture of a `model_type`. Raises InputError that lists what there is."""
    known = architectures()
    if model_type not in known:
        raise InputError(
            f"config.json has model_type {model_type!r}; supported: {', '.join(sorted(known))}. To add "
            "one, write parallel/architectures/MODEL_TYPE.py"
        )
    return known[model_type]
