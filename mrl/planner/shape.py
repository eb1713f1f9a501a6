"""The sizes of a model that determine its cost, and the parameters of each of its parts.

Dimensions: H hidden, V vocabulary, E experts, K experts per token, h heads, g key/value heads, d head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrl.config.adapter import Adapter
from mrl.errors import InputError
from mrl.planner.attention import (
    Indexer,
    LatentAttention,
    LinearAttention,
    read_indexer,
    read_latent,
    read_linear,
)
from mrl.planner.parts import Part, all_active
from parallel.architectures import find_architecture
from parallel.architectures.base import Architecture, HfConfig
from parallel.dims import ModelSizes

POSITIVE = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads")  # fmt: skip


@dataclass(frozen=True)
class AdaptedLayer:
    """The parameters and activations of an adapter in one layer."""

    parts: tuple[Part, ...]
    """The matrices A and B of each adapted module."""
    gathered: int
    """Number of elements per token of those products `A x` that tensor-parallel ranks gather. These
    products are kept for the backward pass."""
    kept: int
    """Number of elements per row of all other products `A x`. These products are kept for the
    backward pass as well."""
    outputs: int
    """Number of elements per row of the largest update `B A x` of a linear layer."""


@dataclass(frozen=True)
class AdapterShape:
    """The sizes of an adapter's matrices in a model, from `mrl.planner.adapter.count_adapter`."""

    adapter: Adapter
    layers: tuple[AdaptedLayer, ...]
    num_tensors: int
    """Number of tensors in the adapter's PEFT file."""

    @property
    def parts(self) -> list[Part]:
        """All parameters of the adapter, each once."""
        return [part for layer in self.layers for part in layer.parts]

    @property
    def num_parameters(self) -> int:
        return sum(part.num for part in self.parts)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with SwiGLU and RMSNorm, in which each layer is dense or MoE."""

    sizes: ModelSizes
    """The sizes of the model that must be divisible by the sizes of a parallel layout."""
    num_layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    dense_ffn: int
    moe_layers: tuple[int, ...]
    """0-based indices of the MoE layers."""
    num_experts: int
    topk: int
    moe_ffn: int
    shared_ffn: int
    """Number of columns of all shared experts together; 0 if there are none."""
    tied: bool
    qk_norm: bool = False
    norms_whole_projections: bool = False
    """Whether the norms of queries and keys are over all heads together, as in OLMoE."""
    qkv_bias: bool = False
    linear_bias: bool = False
    """Whether all linear layers, those of experts and the routers have biases, as in gpt-oss."""
    sinks: bool = False
    """Whether each head has a learned logit in the denominator of its softmax, as in gpt-oss."""
    yarn_positions: int = 0
    """Number of positions in YaRN's tables of the whole model, as in gpt-oss; 0 without them."""
    shared_gate: bool = False
    """Whether a sigmoid gate [H -> 1] scales the shared expert, as in Qwen2-MoE."""
    expert_bias: bool = False
    """Whether a bias balances the router's choices. It is a buffer, not a parameter."""
    mla: LatentAttention | None = None
    """The sizes of latent attention; None if the model has grouped-query attention."""
    indexer: Indexer | None = None
    """The sizes of the layers' indexers; None if attention is not sparse."""
    output_gate: bool = False
    """Whether the queries' projection also gives a gate for each element of attention's output."""
    linear: LinearAttention | None = None
    """The layers with linear attention; None if there are none."""
    num_mtp: int = 0  # MTP layers that are trained: layers from `num_layers` on, with experts
    adapter: AdapterShape | None = None
    """If set, only the adapter is trained, and the model's own parameters are frozen."""

    @property
    def query_width(self) -> int:
        """Number of elements of a token's queries, over all heads.

        Under latent attention, a token's keys have the same number of elements.
        """
        per_head = self.mla.nope_dim + self.mla.rope_dim if self.mla else self.head_dim
        return self.heads * per_head

    @property
    def value_width(self) -> int:
        """Number of elements of a token's attention output, over all heads."""
        return self.heads * (self.mla.value_dim if self.mla else self.head_dim)

    @property
    def kv_width(self) -> int:
        """Number of elements of a token's keys and values during training.

        Latent attention is counted in its expanded form here (compare `kv_cache_width`).
        """
        if self.mla:
            return self.query_width + self.value_width
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_cache_width(self) -> int:
        """Number of elements that an engine caches per token and layer, before sharding over heads.

        Latent attention caches its compressed vectors, which are not sharded.
        """
        return self.mla.kv_rank + self.mla.rope_dim if self.mla else self.kv_width

    @property
    def full_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers whose attention is not linear."""
        linear = self.linear.layers if self.linear else ()
        return tuple(n for n in range(self.num_layers) if n not in linear)

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """Numbers of elements of the larger matrices of all kinds of attention."""
        return (*self._full_sizes, *(self.linear.matrices if self.linear else ()))

    @property
    def _full_sizes(self) -> tuple[int, ...]:
        """Those of grouped-query attention (query-key-value, output) or latent attention."""
        out = self.hidden * self.value_width
        if self.mla is None:
            queries = self.query_width * (1 + self.output_gate)
            return self.hidden * (queries + self.kv_width), out
        expanded = self.heads * (self.mla.nope_dim + self.mla.value_dim)
        queries = (self.mla.q_rank or self.hidden) * self.query_width
        return queries, self.mla.kv_rank * expanded, out

    def embedding(self) -> Part:
        """Return the embedding's parameters. A token only looks up one row, which costs no FLOPs."""
        num = self.vocab * self.hidden
        return Part("embedding", "tensor", ((1, num),), num)

    def output(self) -> Part:
        """Return the parameters of the output layer: no tensors if it is tied to the embedding."""
        num = self.vocab * self.hidden
        return Part("output", "tensor", () if self.tied else ((1, num),), num)

    def final_norm(self) -> Part:
        return all_active("norms", "whole", self.hidden)

    def layer(self, number: int) -> list[Part]:
        """List the parameters of the layer with the 0-based index `number`."""
        parts = [all_active("norms", "whole", self.hidden, self.hidden), *self._attention(number)]
        if number not in self.moe_layers and number < self.num_layers:
            return [*parts, self._mlp("dense", self.dense_ffn)]
        fc1, fc2 = 2 * self.hidden * self.moe_ffn, self.hidden * self.moe_ffn
        experts = ((self.num_experts, fc1), (self.num_experts, fc2))
        router = [self.hidden * self.num_experts] + [self.num_experts] * self.linear_bias
        parts.append(all_active("router", "whole", *router))
        parts.append(Part("experts", "expert", experts, self.topk * (fc1 + fc2), is_muons=True))
        if self.linear_bias:
            up, down = (self.num_experts, 2 * self.moe_ffn), (self.num_experts, self.hidden)
            parts.append(Part("experts", "expert", (up,), self.topk * up[1]))
            parts.append(Part("experts", "expert_whole", (down,), self.topk * down[1]))
        if self.shared_ffn:
            parts.append(self._mlp("shared", self.shared_ffn))
        if self.shared_gate:
            parts.append(all_active("shared", "whole", self.hidden))
        return parts

    def _mlp(self, name: str, columns: int) -> Part:
        sizes = 2 * self.hidden * columns, self.hidden * columns
        return all_active(name, "tensor", *sizes, is_muons=True)

    def _attention(self, number: int) -> list[Part]:
        matrices, m = self._full_sizes, self.mla
        if (one := self.linear) is not None and number in one.layers:
            conv, *rest = one.small
            return [
                all_active("attention", "tensor", *one.matrices, is_muons=True),
                all_active("attention", "whole", one.write_and_decay, is_muons=True),
                all_active("attention", "whole", conv),
                all_active("norms", "whole", *rest),
            ]
        if m is None:
            norms = [self.head_dim] * (2 * self.qk_norm)
            if self.norms_whole_projections:
                norms = [self.query_width, self.kv_heads * self.head_dim]
            bias = [self.query_width + self.kv_width] * self.qkv_bias
            return [
                all_active("attention", "tensor", *matrices, is_muons=True),
                all_active("attention", "tensor", *bias, *[self.heads] * self.sinks),
                all_active("attention", "whole", *[self.hidden] * self.linear_bias),
                all_active("norms", "whole", *norms),
            ]
        down = [self.hidden * m.q_rank] * (m.q_rank > 0)
        down.append(self.hidden * (m.kv_rank + m.rope_dim))
        # Megatron replicates the down projections on all tensor-parallel ranks.
        return [
            all_active("attention", "tensor", *matrices, is_muons=True),
            all_active("attention", "whole", *down, is_muons=True),
            all_active("norms", "whole", *[m.q_rank] * (m.q_rank > 0), m.kv_rank),
            *self._indexer_parts(),
        ]

    def _indexer_parts(self) -> list[Part]:
        if self.indexer is None:
            return []
        return [
            replace(all_active(name, "whole", *numels), is_frozen=True)
            for name, numels in (("indexer", self.indexer.matrices), ("norms", self.indexer.norm))
        ]

    def parts(self) -> list[Part]:
        """List every parameter of the model once, without the adapter's parameters."""
        layers = [part for number in range(self.num_layers) for part in self.layer(number)]
        return [self.embedding(), *layers, self.final_norm(), self.output()]

    def count(self) -> dict[str, int]:
        """Return the number of parameters by part name."""
        totals: dict[str, int] = {}
        for part in self.parts():
            totals[part.name] = totals.get(part.name, 0) + part.num
        return totals

    @property
    def num_parameters(self) -> int:
        return sum(part.num for part in self.parts())

    @property
    def num_quantized(self) -> int:
        """Number of weights that `rollout.quantization` quantises: those of attention, MLPs and
        experts. Biases of the attention are counted too."""
        layers = range(self.num_layers)
        return sum(part.num for n in layers for part in self.layer(n) if part.sharing != "whole")

    @property
    def num_active(self) -> int:
        """Number of active parameters per token, as model cards count them.

        It includes the embedding and the output layer. A tied matrix counts once.
        """
        active = sum(p.num_active for p in self.parts())
        return active - self.tied * self.vocab * self.hidden


def read_shape(hf: HfConfig, architecture: Architecture | None = None) -> ModelShape:
    """Return the shape of the model that a Hugging Face config.json describes.

    The shape is derived from the Megatron settings with which the trainer builds the model.
    `architecture` defaults to the architecture that is registered for the config's model_type.
    Raises InputError for a model that the trainer refuses, a missing key, or a size that is not a
    whole number.
    """
    architecture = architecture or find_architecture(hf)
    try:
        _check_numbers(hf)
        return _shape(hf, architecture)
    except KeyError as error:
        kind = architecture.model_type
        raise InputError(f"config.json of a {kind} lacks the key {error}; add it") from None


def _check_numbers(hf: HfConfig) -> None:
    """Raise InputError for a size that is not a whole number, or is too small."""
    for key, value in hf.items():
        sized = key.endswith(("_size", "_heads", "_layers", "_experts", "_dim", "_rank"))
        least = 1 if key in POSITIVE else 0
        lists = key.endswith("only_layers")
        if not sized or lists or (value is None and not least):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"config.json: {key} is {value!r}, expected a whole number >= {least}")


def _shape(hf: HfConfig, architecture: Architecture) -> ModelShape:
    settings, sizes = architecture.transformer_config(hf), architecture.sizes(hf)
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
        norms_whole_projections=architecture.norms_whole_projections,
        qkv_bias=settings.get("add_qkv_bias", False) or settings.get("add_bias_linear", False),
        linear_bias=settings.get("add_bias_linear", False),
        sinks=settings.get("softmax_type") == "learnable",
        shared_gate=settings.get("moe_shared_expert_gate", False),
        expert_bias=settings.get("moe_router_enable_expert_bias", False),
        mla=read_latent(settings),
        yarn_positions=settings.get("yarn_original_max_position_embeddings", 0),
        output_gate=settings.get("attention_output_gate", False),
        linear=read_linear(settings),
        num_mtp=architecture.num_trained_mtp,
        indexer=read_indexer(settings),
    )
