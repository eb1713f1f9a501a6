"""Read Megatron's options in the `megatron:` section of a recipe, and check them against Megatron's
dataclasses.

An option has the name of a field of these dataclasses. If several dataclasses have a field of that
name, the option sets the field in all of them. Values are YAML: a dtype is given by its torch name
("bfloat16"), and a member of an enum by its name ("flash").
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib.metadata
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union

import torch

from mrl.config.dtypes import LONG_NAMES
from mrl.errors import InputError
from parallel.options.fields import ALLOWED, NEVER_ON, OWNED, REASONS


@dataclasses.dataclass(frozen=True)
class MegatronOptions:
    """Arguments of Megatron's dataclasses that the recipe sets, in addition to those that mrl
    sets."""

    transformer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of TransformerConfig or MLATransformerConfig."""
    ddp: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of DistributedDataParallelConfig."""
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of OptimizerConfig."""

    @property
    def recomputes_routers(self) -> bool:
        """Whether selective recompute runs the routers a second time in the backward pass."""
        return self.transformer.get("recompute_granularity") == "selective" and "moe" in (
            self.transformer.get("recompute_modules") or ()
        )


Part = Literal["transformer", "ddp", "optimizer"]
Fields = Mapping[str, Mapping[Part, Any]]
"""Maps the name of a field to its types, one for each dataclass that has the field. A dataclass is
named as in MegatronOptions."""


def read_options(given: Mapping[str, Any]) -> MegatronOptions:
    """Check each option by itself, and assign it to the dataclasses that have the field. Imports
    Megatron if there are any options.

    Raises InputError for a name that the installed version does not have (the message suggests the
    closest name), a name that mrl or another key of the recipe sets, a name that mrl refuses, or a
    value of the wrong type.
    """
    if not given:
        return MegatronOptions()
    fields = installed_fields()
    parts: dict[Part, dict[str, Any]] = {"transformer": {}, "ddp": {}, "optimizer": {}}
    for name, value in given.items():
        if name in NEVER_ON and name in fields and value is False:
            continue
        _check_name(name, fields)
        for part, kind in fields[name].items():
            parts[part][name] = _parse(name, value, kind)
    return MegatronOptions(**parts)


@cache
def installed_fields() -> Fields:
    """Return the fields of Megatron's dataclasses in the installed version.

    TransformerConfig is not read separately, because MLATransformerConfig has all of its fields.
    """
    found: dict[str, dict[Part, Any]] = {}
    for part, owner in _classes().items():
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            found.setdefault(field.name, {})[part] = hints[field.name]
    return found


def is_off_by_default(name: str, value: Any) -> bool:
    """Return whether an option turns off something that is off by default in Megatron."""
    owners = [owner for owner in _classes().values() if hasattr(owner, name)]
    return value is False and all(getattr(owner, name) is False for owner in owners)


@cache
def _classes() -> Mapping[Part, type]:
    from parallel import prepare

    prepare()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return {
        "transformer": MLATransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }


def _check_name(name: str, fields: Fields) -> None:
    version = f"megatron-core {importlib.metadata.version('megatron-core')}"
    if name not in fields:
        near = difflib.get_close_matches(name, [*ALLOWED & fields.keys(), *fields], n=1)
        more = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"megatron.{name}: {version} has no such option{more}")
    if name in OWNED:
        raise InputError(f"megatron.{name}: mrl sets it itself; use {OWNED[name]}")
    if name in REASONS:
        raise InputError(f"megatron.{name}: mrl refuses it ({REASONS[name]}); leave it out")
    if name not in ALLOWED:
        raise InputError(
            f"megatron.{name}: {version} has it, but no one has checked that replay, packing and "
            "checkpoints of mrl work with it; leave it out"
        )


class _WrongType(Exception):
    pass


def _parse(name: str, value: Any, kind: Any) -> Any:
    try:
        return _convert(value, kind)
    except _WrongType:
        raise InputError(f"megatron.{name}: got {value!r}, expected {_in_words(kind)}") from None


def _convert(value: Any, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(value, option)
            except _WrongType:
                continue
        raise _WrongType
    if origin is Literal:
        if not any(value == option and type(value) is type(option) for option in arguments):
            raise _WrongType
        return value
    if origin in (list, tuple) or kind in (list, tuple):
        if not isinstance(value, list):
            raise _WrongType
        items = [_convert(item, arguments[0]) for item in value] if arguments else value
        return tuple(items) if (origin or kind) is tuple else items
    if kind is torch.dtype:
        names = LONG_NAMES | {"fp16": "float16"}  # only the optimizer's state may be fp16
        name = names.get(value, value) if isinstance(value, str) else ""
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise _WrongType
        return found
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if value not in kind.__members__:
            raise _WrongType
        return kind[value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # To Python a `bool` is an `int`, but a recipe must not write one for the other.
    if not isinstance(kind, type) or type(value) is not kind:
        raise _WrongType
    return value


def _in_words(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(option) for option in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (list, tuple) or kind in (list, tuple):
        return f"a list of {_in_words(arguments[0])}" if arguments else "a list"
    if kind is torch.dtype:
        return "the torch name of a dtype, such as bfloat16"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(kind.__members__)
    words = {
        bool: "true or false", int: "an integer", float: "a number", str: "text",
        type(None): "null",
    }  # fmt: skip
    return words.get(kind, f"Megatron's type {kind}")
