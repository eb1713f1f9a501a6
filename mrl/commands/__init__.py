"""The commands of `mrl`. Each command is a module: `add_to(commands)` adds its argument parser, and
`run(args)` executes the command.

Slow imports belong in `run`, after the checks that do not need them, so that `mrl --help` and the
report of bad input import neither torch nor Megatron nor pydantic. tests/house/test_command_imports.py
checks this.
"""

from __future__ import annotations

from types import ModuleType

from mrl.commands import (
    branch,
    check,
    diff,
    drill,
    engines,
    evaluate,
    export,
    recipe,
    replay,
    reward,
    serve,
    tenants,
    toy_model,
    train,
    upcycle,
    view,
    why,
)

ALL: tuple[ModuleType, ...] = (
    toy_model,
    upcycle,
    recipe,
    check,
    train,
    serve,
    tenants,
    engines,
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
