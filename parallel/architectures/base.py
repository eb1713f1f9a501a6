"""What an architecture has to say: sizes, Megatron's settings, and one table of parameter rules.

The table serves both directions, HF -> Megatron and Megatron -> HF, at any TP/PP/EP. `{layer}` is the
0-based layer of the whole model and `{expert}` the expert of the whole model, in both columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from parallel.dims import ModelSizes

Split = Literal["none", "rows", "columns", "gated", "qkv"]
"""How a Megatron parameter is shared out over tensor-parallel ranks.

- none: whole on every rank.
- rows: dim 0 in rank order. columns: dim 1 in rank order.
- gated: [gate; up] stacked in dim 0, each split by rows (SwiGLU's linear_fc1).
- qkv: query groups in dim 0, each [its query heads; key; value], shared out by group.
"""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the HF parameters that it is made of."""

    megatron: str
    hf: tuple[str, ...]
    split: Split = "none"
    is_buffer: bool = False
    """Megatron keeps it as a buffer: no gradient, no optimizer state, always fp32."""

    @property
    def shard_dim(self) -> int:
        """The dimension of its HF tensors that tensor-parallel ranks share out."""
        return 1 if self.split == "columns" else 0


HfConfig = dict[str, Any]
"""A parsed config.json."""


@dataclass(frozen=True)
class Architecture:
    """Everything that mrl must know about a `model_type`."""

    model_type: str
    sizes: Callable[[HfConfig], ModelSizes]
    transformer_config: Callable[[HfConfig], dict[str, Any]]
    """Keyword arguments of Megatron's TransformerConfig."""
    rules: Callable[[HfConfig], list[Rule]]
    moe_layer_numbers: Callable[[HfConfig], tuple[int, ...]]
    """Megatron's 1-based numbers of the MoE layers."""
    unread: Callable[[HfConfig], dict[str, str]] = lambda hf: {}
    """What of a checkpoint is left out on purpose: prefix of the HF names -> a line for the plan."""


def rule_pattern(rule: Rule) -> re.Pattern[str]:
    """Matches the Megatron names of a rule, with the groups `layer` and `expert` where it has them."""
    return name_pattern(rule.megatron)


def name_pattern(name: str) -> re.Pattern[str]:
    """Matches the names that `{layer}` and `{expert}` of a name of the table stand for, as groups."""
    escaped = re.escape(name)
    for field in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + field + "}"), rf"(?P<{field}>\d+)")
    return re.compile(escaped)
