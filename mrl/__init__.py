"""Reinforcement learning for MoE models: Megatron-core trains, SGLang generates, and the trainer
replays the engine's expert routes (R3).

`import mrl` gives Python code the functions `load_recipe`, `train` and `evaluate`, and the classes
of callbacks, results and errors. Each name is imported at its first use, so `import mrl` itself is
fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mrl.version import __version__ as __version__

if TYPE_CHECKING:
    from mrl.api.recipes import load_recipe
    from mrl.api.runs import Evaluation, TrainResult, evaluate, train
    from mrl.config import Recipe
    from mrl.errors import InputError, RunFailed
    from mrl.run.callbacks import Callback
    from mrl.types import Sample, SampleGroup

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
_MODULES = {
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
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the sorted names of the module, including public names that were not imported yet."""
    return sorted([*globals(), *_MODULES])
