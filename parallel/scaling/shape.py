"""The numbers of a model that its cost depends on, and its parameters by part.

Dimensions: H hidden, V vocabulary, E experts, K experts per token, h heads, g key/value heads, d head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mrl.config.adapter import Adapter
from mrl.errors import InputError
from parallel.architectures import find_architecture
from parallel.architectures.base import Architecture, HfConfig
from parallel.dims import ModelSizes

POSITIVE = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads")  # fmt: skip
Sharing = Literal["whole", "tensor", "expert", "expert_whole"]
"""The ranks of a pipeline stage that share out a parameter: none, the tensor-parallel, the expert (and
expert-tensor) parallel ones, or the expert-parallel ones alone: an expert's matrix that every
expert-tensor-parallel rank has as a whole."""


Tensors = tuple[tuple[int, int], ...]
"""(how many, elements of each)."""


@dataclass(frozen=True)
class Part:
    """A part is the parameters of one kind in one layer, embedding or output."""

    name: str
    """`embedding`, `output`, `attention`, `router`, `experts`, `shared`, `dense`, `norms`, or
    `adapter`."""
    sharing: Sharing
    tensors: Tensors
    """Megatron's parameters, each of the whole model."""
    num_active: int
    """Elements that one token passes through."""

    @property
    def num(self) -> int:
        """Elements in the whole model."""
        return sum(count * numel for count, numel in self.tensors)


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of multi-head latent attention are these (DeepSeek-V2, arXiv 2405.04434, section
    2.1)."""

    q_rank: int
    """0: queries are projected at once."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary_positions: int = 0
    """YaRN keeps a table of cosines and one of sines of so many positions in every layer."""


@dataclass(frozen=True)
class AdaptedLayer:
    """What an adapter has in one layer is counted here."""

    parts: tuple[Part, ...]
    """A and B of each module."""
    gathered: int
    """Elements of A x of a token that tensor-parallel ranks gather, and keep for the backward."""
    kept: int
    """Elements of all other A x that one row keeps."""
    outputs: int
    """Elements that the largest update of a linear layer gives for one row."""


@dataclass(frozen=True)
class AdapterShape:
    """The low-rank matrices of a model are counted here (`parallel.scaling.adapter` makes it)."""

    adapter: Adapter
    layers: tuple[AdaptedLayer, ...]
    num_tensors: int
    """Tensors of PEFT's file."""

    @property
    def parts(self) -> list[Part]:
        """List every parameter of the adapter once."""
        return [part for layer in self.layers for part in layer.parts]

    @property
    def num_parameters(self) -> int:
        return sum(part.num for part in self.parts)


@dataclass(frozen=True)
class ModelShape:
    """The model is a decoder-only transformer with SwiGLU and RMSNorm, each layer dense or MoE."""

    sizes: ModelSizes
    """What a layout has to divide."""
    num_layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    dense_ffn: int
    moe_layers: tuple[int, ...]
    """0-based."""
    num_experts: int
    topk: int
    moe_ffn: int
    shared_ffn: int
    """Columns of all shared experts together; 0 without."""
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    shared_gate: bool = False
    """Qwen2-MoE scales its shared expert by a sigmoid gate [H -> 1]."""
    expert_bias: bool = False
    """The router's choice is balanced by a bias, which is a buffer and no parameter."""
    mla: LatentAttention | None = None
    adapter: AdapterShape | None = None
    """What is trained in the place of the model's own parameters, which are frozen then."""

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries (and keys, once expanded) of a token."""
        per_head = self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_dim
        return self.heads * per_head

    @property
    def value_width(self) -> int:
        """Elements of the attention's output of a token."""
        return self.heads * (self.mla.value_dim if self.mla else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys and values in training: latent attention expands them."""
        if self.mla:
            return self.query_width + self.value_width
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_cache_width(self) -> int:
        """Elements that an engine caches per token and layer; latent attention's is not shared out."""
        return self.mla.kv_rank + self.mla.rope_dim if self.mla else self.kv_width

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """Elements of its larger matrices: queries' (with grouped keys and values), keys', output."""
        out = self.hidden * self.value_width
        if self.mla is None:
            return self.hidden * (self.query_width + self.kv_width), out
        expanded = self.heads * (self.mla.nope_dim + self.mla.value_dim)
        queries = (self.mla.q_rank or self.hidden) * self.query_width
        return queries, self.mla.kv_rank * expanded, out

    def embedding(self) -> Part:
        """One token reads one row: it multiplies nothing."""
        num = self.vocab * self.hidden
        return Part("embedding", "tensor", ((1, num),), num)

    def output(self) -> Part:
        """Return the head's matrix, which a tied model shares with the embedding."""
        num = self.vocab * self.hidden
        return Part("output", "tensor", () if self.tied else ((1, num),), num)

    def final_norm(self) -> Part:
        return _all("norms", "whole", self.hidden)

    def layer(self, number: int) -> list[Part]:
        """List the parameters of 0-based layer `number`."""
        parts = [_all("norms", "whole", self.hidden, self.hidden), *self._attention()]
        if number not in self.moe_layers:
            return [*parts, self._mlp("dense", self.dense_ffn)]
        fc1, fc2 = 2 * self.hidden * self.moe_ffn, self.hidden * self.moe_ffn
        experts = ((self.num_experts, fc1), (self.num_experts, fc2))
        parts.append(_all("router", "whole", self.hidden * self.num_experts))
        parts.append(Part("experts", "expert", experts, self.topk * (fc1 + fc2)))
        if self.shared_ffn:
            parts.append(self._mlp("shared", self.shared_ffn))
        if self.shared_gate:
            parts.append(_all("shared", "whole", self.hidden))
        return parts

    def _mlp(self, name: str, columns: int) -> Part:
        return _all(name, "tensor", 2 * self.hidden * columns, self.hidden * columns)

    def _attention(self) -> list[Part]:
        if self.mla is None:
            width = self.query_width + self.kv_width
            matrices = [self.hidden * width, self.hidden * self.value_width]
            norms = [self.head_dim] * (2 * self.qk_norm)
            bias = [width] * self.qkv_bias
            return [_all("attention", "tensor", *matrices, *bias), _all("norms", "whole", *norms)]
        m = self.mla
        queries = (m.q_rank or self.hidden) * self.query_width
        expanded = m.kv_rank * self.heads * (m.nope_dim + m.value_dim)
        up = (queries, expanded, self.value_width * self.hidden)
        down = [self.hidden * m.q_rank] * (m.q_rank > 0)
        # Megatron duplicates the down projections on the tensor-parallel ranks.
        return [
            _all("attention", "tensor", *up),
            _all("attention", "whole", *down, self.hidden * (m.kv_rank + m.rope_dim)),
            _all("norms", "whole", *[m.q_rank] * (m.q_rank > 0), m.kv_rank),
        ]

    def parts(self) -> list[Part]:
        """List every parameter of the model once, without those of an adapter."""
        layers = [part for number in range(self.num_layers) for part in self.layer(number)]
        return [self.embedding(), *layers, self.final_norm(), self.output()]

    def count(self) -> dict[str, int]:
        """Count parameters by the name of their part."""
        totals: dict[str, int] = {}
        for part in self.parts():
            totals[part.name] = totals.get(part.name, 0) + part.num
        return totals

    @property
    def num_parameters(self) -> int:
        return sum(part.num for part in self.parts())

    @property
    def num_active(self) -> int:
        """Active parameters as model cards count them: embedding and head included (a tied
        matrix once)."""
        own = sum(p.num_active for p in self.parts())
        return own - self.tied * self.vocab * self.hidden


def _all(name: str, sharing: Sharing, *numels: int) -> Part:
    """A part of which each token passes through everything."""
    return Part(name, sharing, tuple((1, numel) for numel in numels), sum(numels))


def read_shape(hf: HfConfig, architecture: Architecture | None = None) -> ModelShape:
    """A Hugging Face config.json -> its shape, through the settings that the trainer would use.

    `architecture`: that of its model_type by default.

    Raises InputError for whatever the trainer refuses, and for a lost key or a size that is none.
    """
    architecture = architecture or find_architecture(hf)
    try:
        _check_numbers(hf)
        return _shape(hf, architecture.transformer_config(hf), architecture.sizes(hf))
    except KeyError as error:
        kind = architecture.model_type
        raise InputError(f"config.json of a {kind} lacks the key {error}; add it") from None


def _check_numbers(hf: HfConfig) -> None:
    """Raise InputError for a size that is not a number of things."""
    for key, value in hf.items():
        sized = key.endswith(("_size", "_heads", "_layers", "_experts", "_dim", "_rank"))
        least = 1 if key in POSITIVE else 0
        lists = key.endswith("only_layers")
        if not sized or lists or (value is None and not least):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"config.json: {key} is {value!r}, expected a whole number >= {least}")


def _shape(hf: HfConfig, settings: dict[str, Any], sizes: ModelSizes) -> ModelShape:
    """`settings`: those of Megatron's TransformerConfig."""
    latent = None
    if settings.get("multi_latent_attention"):
        latent = LatentAttention(
            q_rank=settings["q_lora_rank"] or 0,
            kv_rank=settings["kv_lora_rank"],
            nope_dim=settings["qk_head_dim"],
            rope_dim=settings["qk_pos_emb_head_dim"],
            value_dim=settings["v_head_dim"],
            rotary_positions=settings.get("original_max_position_embeddings", 0),
        )
    return ModelShape(
        sizes=sizes,
        num_layers=sizes.num_layers,
        hidden=settings["hidden_size"],
        vocab=sizes.vocab_size,
        heads=sizes.num_attention_heads,
        kv_heads=sizes.num_query_groups,
        head_dim=settings["kv_channels"],
        dense_ffn=settings["ffn_hidden_size"],
        moe_layers=tuple(n for n, moe in enumerate(settings["moe_layer_freq"]) if moe),
        num_experts=sizes.num_experts,
        topk=settings.get("moe_router_topk", 0),
        moe_ffn=sizes.moe_ffn_size,
        shared_ffn=sizes.shared_expert_ffn_size,
        tied=bool(hf.get("tie_word_embeddings")),
        qk_norm=settings.get("qk_layernorm", False),
        qkv_bias=settings.get("add_qkv_bias", False),
        shared_gate=settings.get("moe_shared_expert_gate", False),
        expert_bias=settings.get("moe_router_enable_expert_bias", False),
        mla=latent,
    )
