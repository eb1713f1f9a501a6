"""One file a model architecture, found by the `model_type` of a Hugging Face config.json."""

from __future__ import annotations

import importlib
import pkgutil

from mrl.errors import InputError
from parallel.architectures.base import Architecture


def load_architecture(model_type: str) -> Architecture:
    """The module for a `model_type`. Raises InputError that lists what there is."""
    known = sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")
    if model_type not in known:
        raise InputError(
            f"config.json has model_type {model_type!r}; supported: {', '.join(known)}. To add one, "
            "write parallel/architectures/MODEL_TYPE.py"
        )
    return importlib.import_module(f"{__name__}.{model_type}").ARCHITECTURE
