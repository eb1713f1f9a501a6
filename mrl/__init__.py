"""mrl: Megatron-core trains, SGLang rolls out, routes are replayed (R3).

`import mrl` gives Python what the command line has: `load_recipe`, `train`, `evaluate`, callbacks and
the errors. They are imported when they are first used, so that the import alone takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.api.recipes import load_recipe
    from mrl.api.runs import Evaluation, TrainResult, evaluate, train
    from mrl.config import Recipe
    from mrl.errors import InputError, RunFailed
    from mrl.run.callbacks import Callback
    from mrl.types import Sample, SampleGroup

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Evaluation",
    "InputError",
    "Recipe",
    "RunFailed",
    "Sample",
    "SampleGroup",
    "TrainResult",
    "evaluate",
    "load_recipe",
    "train",
]
_PLACES = {
    "Callback": "mrl.run.callbacks",
    "Evaluation": "mrl.api.runs",
    "InputError": "mrl.errors",
    "Recipe": "mrl.config",
    "RunFailed": "mrl.errors",
    "Sample": "mrl.types",
    "SampleGroup": "mrl.types",
    "TrainResult": "mrl.api.runs",
    "evaluate": "mrl.api.runs",
    "load_recipe": "mrl.api.recipes",
    "train": "mrl.api.runs",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"module 'mrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """List the public names, also those that were not used yet."""
    return sorted([*globals(), *_PLACES])
