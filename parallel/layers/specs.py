"""Specs of Megatron's layers, in the two forms that its releases give them.

A spec says which class is built with which submodules. It is a `ModuleSpec`, whose fields are set in
place, or a `functools.partial` of the class, which is replaced by another: megatron-core 0.16 has the
first form everywhere, 0.19 has the second for everything below a layer's `mlp`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer


def has_experts(layer_submodules: Any) -> bool:
    """Whether the decoder layer of these submodules is an MoE layer, and not a dense one."""
    spec = layer_submodules.mlp
    kind = spec.func if isinstance(spec, partial) else spec.module
    return isinstance(kind, type) and issubclass(kind, MoELayer)


def submodules_of(spec: Any) -> Any:
    """Return the submodules that a spec builds its class with; what is set in them counts."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def of_module(spec: Any, module: type) -> Any:
    """Return a spec that builds another class with the same submodules and arguments."""
    if isinstance(spec, partial):
        return partial(module, *spec.args, **spec.keywords)
    return dataclasses.replace(spec, module=module)
