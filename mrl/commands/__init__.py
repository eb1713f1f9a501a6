"""Each command is one file: `add_to(commands)` says what it takes, and its `run` does it.

Heavy imports belong into `run`: `mrl --help` must not wait for Megatron.
"""

from __future__ import annotations

from types import ModuleType

from mrl.commands import (
    branch,
    check,
    diff,
    drill,
    evaluate,
    export,
    recipe,
    replay,
    reward,
    serve,
    tenants,
    toy_model,
    train,
    view,
    why,
)

ALL: tuple[ModuleType, ...] = (
    toy_model,
    recipe,
    check,
    train,
    serve,
    tenants,
    branch,
    evaluate,
    export,
    view,
    why,
    replay,
    diff,
    reward,
    drill,
)
"""The commands, in the order of `mrl --help`."""
