"""Tries what users do: see things.py."""

import importlib
import pkgutil

NOT_THINGS = ("things", "test_", "__")


def load() -> None:
    """Import the files of this folder that add things."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith(NOT_THINGS):
            importlib.import_module(f"{__name__}.{module.name}")
