"""The definition of an architecture: sizes, Megatron's settings, and one table of parameter rules.

The table serves both directions, HF -> Megatron and Megatron -> HF, at any TP/PP/EP. In HF and
Megatron names, `{layer}` and `{expert}` are 0-based indices in the whole model, not in a rank's part.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from parallel.dims import ModelSizes

Split = Literal["none", "rows", "columns", "gated", "qkv", "gated_qkv"]
"""How a Megatron parameter is split over tensor-parallel ranks, or an expert's parameter over
expert-tensor-parallel ranks.

- none: every rank holds the whole parameter.
- rows: dim 0 is split in rank order.
- columns: dim 1 is split in rank order.
- gated: gate and up are stacked in dim 0, and each is split by rows (SwiGLU's linear_fc1).
- qkv: dim 0 has the query groups, each with its query heads, key and value; it is split by group.
- gated_qkv: as qkv, with the output gates of a group's heads between its query heads and its key. In
  the HF tensor of the queries, each head's rows are followed by the rows of its gate.
"""


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, and the HF parameters of which it consists."""

    megatron: str
    hf: tuple[str, ...]
    split: Split = "none"
    is_buffer: bool = False
    """Whether Megatron keeps the parameter as a buffer: without gradient and optimizer state, and
    always in fp32."""
    is_frozen: bool = False
    """Whether the parameter is never trained, but held and exported in the dtype of the weights. It is
    a buffer of the module, too, without gradient and optimizer state."""
    layers: tuple[int, ...] | None = None
    """The 0-based indices of the layers that have the parameter, in a model whose layers have
    different attention; None if the kind of the layer's MLP alone decides."""

    @property
    def shard_dim(self) -> int:
        """The dimension along which the rule's HF tensors are split over tensor-parallel ranks. It has
        no meaning for a parameter that is not split."""
        return 1 if self.split == "columns" else 0


HfConfig = dict[str, Any]
"""A parsed config.json."""


@dataclass(frozen=True)
class Stacked:
    """A tensor of a checkpoint that holds the same weights of all experts of a layer.

    mrl's rules name the weights of one expert, as if the checkpoint had them apart. For K `parts`, a
    weight [out, in] of part i and expert e is `tensor[e, :, i::K].T`, and a bias [out] of it is
    `tensor[e, i::K]`.
    """

    name: str
    """The name in the checkpoint, with `{layer}`."""
    parts: tuple[str, ...]
    """The names in the rules, with `{layer}` and `{expert}`, in the order in which they alternate in
    the last dimension of the tensor."""


@dataclass(frozen=True)
class MtpLayers:
    """The multi-token-prediction (MTP) layers that checkpoints may have after their decoder layers.

    Every function takes a parsed config.json. MTP layer k, from 0, is layer `num_layers + k` in the
    rules. `parallel.architectures.mtp` makes the rules.
    """

    num: Callable[[HfConfig], int]
    """Returns how many MTP layers the checkpoint has, as far as config.json says."""
    rules: Callable[[HfConfig], list[Rule]]
    """Returns the rules of the MTP layers."""
    copies: Callable[[HfConfig], dict[str, str]] = lambda hf: {}
    """Returns the tensors of the MTP layers that repeat another tensor of the checkpoint, as a dict
    from their names to the name of that tensor: the embedding and the output layer."""


@dataclass(frozen=True)
class Architecture:
    """What mrl must know about a `model_type`. Every function takes a parsed config.json."""

    model_type: str
    sizes: Callable[[HfConfig], ModelSizes]
    transformer_config: Callable[[HfConfig], dict[str, Any]]
    """Returns keyword arguments of Megatron's TransformerConfig."""
    rules: Callable[[HfConfig], list[Rule]]
    moe_layer_numbers: Callable[[HfConfig], tuple[int, ...]]
    """Returns Megatron's 1-based numbers of the MoE layers."""
    unread: Callable[[HfConfig], dict[str, str]] = lambda hf: {}
    """Returns the tensors of a checkpoint that mrl does not read, as a dict from a prefix of tensor
    names to the explanation that the plan (`mrl check --plan`) shows. `mrl export` copies them from
    the model folder."""
    norms_whole_projections: bool = False
    """Whether the norms of queries and keys (Megatron's `qk_layernorm`) are over all heads together,
    as in OLMoE. Otherwise each head is normalised by itself."""
    stacked: tuple[Stacked, ...] = ()
    """The tensors of a checkpoint that hold the weights of all experts of a layer."""
    mtp: MtpLayers | None = None
    """The MTP layers that mrl can train; None if there are none that it knows."""
    num_trained_mtp: int = 0
    """The number of MTP layers that are trained, whose rules `rules` then has too
    (`parallel.architectures.mtp.training_mtp`)."""
    needs_native: str = ""
    """Why the model needs mrl's own layers (docs/layers.md), for messages. Empty if it can have
    TransformerEngine's layers, too."""


def rule_pattern(rule: Rule) -> re.Pattern[str]:
    """Return a regular expression that matches a rule's Megatron names. Its groups `layer` and
    `expert` match the indices."""
    return name_pattern(rule.megatron)


def name_pattern(name: str) -> re.Pattern[str]:
    """Return a regular expression that matches `name` with digits in place of the placeholders
    `{layer}` and `{expert}`. Its groups `layer` and `expert` match these digits."""
    escaped = re.escape(name)
    for field in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + field + "}"), rf"(?P<{field}>\d+)")
    return re.compile(escaped)
