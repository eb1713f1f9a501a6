"""Check the names, shapes and types of a model folder's tensors against its config.json. Only the
headers of the weight files are read.

The architecture's rules say which HF tensors a Megatron parameter consists of, and the architecture's
settings give the sizes. A parameter that the table SHAPES lacks, such as one of a user's own
architecture, is checked only when the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mrl.errors import InputError
from parallel.architectures.base import Rule
from parallel.architectures.mtp import MTP_LAYER, as_decoder_layer
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, shape_in_words
from parallel.stacked import stored_names

Shape = tuple[int, ...]
FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of weights that can be trained, as safetensors names them."""


class _Sizes:
    """The sizes of a model that appear in the shapes of its tensors, from Megatron's settings."""

    def __init__(self, model: HfModel) -> None:
        settings = model.architecture.transformer_config(model.config)
        self.get: Callable[..., Any] = settings.get
        self.hidden: int = settings["hidden_size"]
        self.heads: int = settings["num_attention_heads"]
        self.groups: int = settings.get("num_query_groups") or self.heads
        self.head_dim: int = settings.get("kv_channels") or self.hidden // self.heads
        self.vocab: int = model.sizes.vocab_size

    def qkv(self) -> tuple[int, int, int]:
        queries = (2 if self.get("attention_output_gate") else 1) * self.heads
        return queries * self.head_dim, self.groups * self.head_dim, self.groups * self.head_dim

    def linear(self) -> tuple[int, int]:
        """Return the widths of all keys and of all values of linear attention."""
        keys = self.get("linear_num_key_heads") * self.get("linear_key_head_dim")
        return keys, self.get("linear_num_value_heads") * self.get("linear_value_head_dim")

    def latent_query(self) -> int:
        """Return the width of all query heads under multi-head latent attention."""
        return self.heads * (self.get("qk_head_dim") + self.get("qk_pos_emb_head_dim"))


Shapes = Callable[[_Sizes], tuple[Shape, ...]]
"""Returns the shapes of one Megatron parameter's HF tensors, in the order of its rule."""


def _mlp(width: Callable[[_Sizes], int]) -> dict[str, Shapes]:
    return {
        "linear_fc1.weight": lambda s: ((width(s), s.hidden),) * 2,
        "linear_fc2.weight": lambda s: ((s.hidden, width(s)),),
    }


def _named(prefix: str, shapes: Mapping[str, Shapes]) -> dict[str, Shapes]:
    return {prefix + name: shape for name, shape in shapes.items()}


_LAYER, _ATTENTION = "decoder.layers.{layer}.", "decoder.layers.{layer}.self_attention."
_MLP = _LAYER + "mlp."
_EXPERT = _MLP + "experts.local_experts.{expert}."
SHAPES: dict[str, Shapes] = {
    "embedding.word_embeddings.weight": lambda s: ((s.vocab, s.hidden),),
    "output_layer.weight": lambda s: ((s.vocab, s.hidden),),
    "decoder.final_layernorm.weight": lambda s: ((s.hidden,),),
    _LAYER + "input_layernorm.weight": lambda s: ((s.hidden,),),
    _LAYER + "pre_mlp_layernorm.weight": lambda s: ((s.hidden,),),
    _ATTENTION + "linear_qkv.weight": lambda s: tuple((rows, s.hidden) for rows in s.qkv()),
    _ATTENTION + "linear_qkv.bias": lambda s: tuple((rows,) for rows in s.qkv()),
    _ATTENTION + "linear_proj.weight": lambda s: ((s.hidden, s.heads * s.head_dim),),
    _ATTENTION + "linear_proj.bias": lambda s: ((s.hidden,),),
    _ATTENTION + "core_attention.softmax_offset": lambda s: ((s.heads,),),
    _MLP + "router.bias": lambda s: ((s.get("num_moe_experts"),),),
    _EXPERT + "linear_fc1.bias": lambda s: ((s.get("moe_ffn_hidden_size"),),) * 2,
    _EXPERT + "linear_fc2.bias": lambda s: ((s.hidden,),),
    _MLP + "router.weight": lambda s: ((s.get("num_moe_experts"), s.hidden),),
    _MLP + "router.expert_bias": lambda s: ((s.get("num_moe_experts"),),),
    _MLP + "shared_experts.gate_weight": lambda s: ((1, s.hidden),),
    **_named(_MLP, _mlp(lambda s: s.get("ffn_hidden_size"))),
    **_named(_EXPERT, _mlp(lambda s: s.get("moe_ffn_hidden_size"))),
    **_named(
        _MLP + "shared_experts.",
        _mlp(lambda s: s.get("moe_shared_expert_intermediate_size")),
    ),
}
"""Maps the name of a Megatron parameter, as in the architecture's rules, to the shapes of its HF
tensors."""
LINEAR_ATTENTION: dict[str, Shapes] = {
    _ATTENTION + "linear_qkvz.weight": lambda s: ((2 * sum(s.linear()), s.hidden),),
    _ATTENTION + "linear_ba.weight": lambda s: ((2 * s.get("linear_num_value_heads"), s.hidden),),
    _ATTENTION + "linear_out.weight": lambda s: ((s.hidden, s.linear()[1]),),
    _ATTENTION + "conv_weight": lambda s: (
        (2 * s.linear()[0] + s.linear()[1], 1, s.get("linear_conv_kernel_dim")),
    ),
    _ATTENTION + "dt_bias": lambda s: ((s.get("linear_num_value_heads"),),),
    _ATTENTION + "A_log": lambda s: ((s.get("linear_num_value_heads"),),),
    _ATTENTION + "norm_weight": lambda s: ((s.get("linear_value_head_dim"),),),
}
"""Maps the parameters of gated delta nets to their shapes."""
MTP_LAYERS: dict[str, Shapes] = {
    f"{MTP_LAYER}.enorm.weight": lambda s: ((s.hidden,),),
    f"{MTP_LAYER}.hnorm.weight": lambda s: ((s.hidden,),),
    f"{MTP_LAYER}.eh_proj.weight": lambda s: ((s.hidden, 2 * s.hidden),),
    f"{MTP_LAYER}.final_layernorm.weight": lambda s: ((s.hidden,),),
}
"""Maps the parameters of MTP layers, without their decoder layers', to their shapes."""
_INDEXER = _ATTENTION + "indexer."
INDEXER: dict[str, Shapes] = {
    _INDEXER + "query_weight": lambda s: (
        (s.get("dsa_indexer_n_heads") * s.get("dsa_indexer_head_dim"), s.get("q_lora_rank")),
    ),
    _INDEXER + "key_weight": lambda s: ((s.get("dsa_indexer_head_dim"), s.hidden),),
    _INDEXER + "head_weight": lambda s: ((s.get("dsa_indexer_n_heads"), s.hidden),),
    _INDEXER + "key_norm_weight": lambda s: ((s.get("dsa_indexer_head_dim"),),),
    _INDEXER + "key_norm_bias": lambda s: ((s.get("dsa_indexer_head_dim"),),),
}
"""Maps the parameters of indexers (sparse attention) to their shapes."""
PER_HEAD: dict[str, Shapes] = {
    _ATTENTION + "q_layernorm.weight": lambda s: ((s.head_dim,),),
    _ATTENTION + "k_layernorm.weight": lambda s: ((s.head_dim,),),
}
"""Maps the norms of query and key to their shapes in grouped-query attention, if each head is
normalised by itself. In latent attention `q_layernorm` has another shape."""
WHOLE_PROJECTIONS: dict[str, Shapes] = {
    _ATTENTION + "q_layernorm.weight": lambda s: ((s.qkv()[0],),),
    _ATTENTION + "k_layernorm.weight": lambda s: ((s.qkv()[1],),),
}
"""Maps the norms of query and key to their shapes if they are over all heads together."""
_QUERY_LATENT: dict[str, Shapes] = {
    _ATTENTION + "linear_q_down_proj.weight": lambda s: ((s.get("q_lora_rank"), s.hidden),),
    _ATTENTION + "q_layernorm.weight": lambda s: ((s.get("q_lora_rank"),),),
    _ATTENTION + "linear_q_up_proj.weight": lambda s: ((s.latent_query(), s.get("q_lora_rank")),),
}
_QUERY_WHOLE: dict[str, Shapes] = {
    _ATTENTION + "linear_q_proj.weight": lambda s: ((s.latent_query(), s.hidden),),
}
_KEY_VALUE: dict[str, Shapes] = {
    _ATTENTION + "linear_kv_down_proj.weight": lambda s: (
        (s.get("kv_lora_rank") + s.get("qk_pos_emb_head_dim"), s.hidden),
    ),
    _ATTENTION + "kv_layernorm.weight": lambda s: ((s.get("kv_lora_rank"),),),
    _ATTENTION + "linear_kv_up_proj.weight": lambda s: (
        (s.heads * (s.get("qk_head_dim") + s.get("v_head_dim")), s.get("kv_lora_rank")),
    ),
}


def expected_shapes(model: HfModel) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of every HF tensor that config.json implies.

    Parameters that are not in SHAPES or a similar table of this module are left out.
    """
    for _, hf, place, shape in rule_shapes(model):
        yield hf.format(**place), shape


def rule_shapes(model: HfModel) -> Iterator[tuple[Rule, str, dict[str, int], Shape]]:
    """Yield (rule, HF name as in the rule, values of its placeholders `layer` and `expert`, shape)
    for every HF tensor that config.json implies.

    Parameters that are not in SHAPES or a similar table of this module are left out.
    """
    sizes = _Sizes(model)
    table = SHAPES | LINEAR_ATTENTION | INDEXER | MTP_LAYERS
    if not sizes.get("multi_latent_attention"):
        whole = model.architecture.norms_whole_projections
        table |= WHOLE_PROJECTIONS if whole else PER_HEAD
    else:
        table |= _KEY_VALUE | (_QUERY_LATENT if sizes.get("q_lora_rank") else _QUERY_WHOLE)
    for rule in model.architecture.rules(model.config):
        if (shapes := table.get(as_decoder_layer(rule.megatron))) is None:
            continue
        for layer in _layers(rule, model):
            for expert in range(model.sizes.num_experts if "{expert}" in rule.megatron else 1):
                for hf, shape in zip(rule.hf, shapes(sizes), strict=True):
                    yield rule, hf, {"layer": layer, "expert": expert}, shape


def check_tensors(model: HfModel, tensors: HfTensors, may_lack: Collection[str] = ()) -> None:
    """Raise InputError for a tensor that is missing, has a wrong shape or is not floating-point.

    Tensors in `may_lack` may be missing.
    """
    missing, other = [], []
    for name, shape in expected_shapes(model):
        if name not in tensors:
            missing += [] if name in may_lack else [name]
        elif tensors.shape(name) != shape:
            other.append((name, shape))
        elif tensors.dtype(name) not in FLOATS:
            raise InputError(
                f"model.path: {model.path}: {name} is stored as {tensors.dtype(name)}, expected one of "
                f"{', '.join(FLOATS)}; convert the checkpoint to bf16 first"
            )
    if missing := stored_names(model, missing):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"model.path: {model.path} has no tensor {missing[0]}{more}, which config.json means; "
            "download the weights again, or correct config.json"
        )
    if other:
        name, shape = other[0]
        more = f" ({len(other)} tensors are of another shape)" if len(other) > 1 else ""
        raise InputError(
            f"model.path: {model.path}: {name} is {shape_in_words(tensors.shape(name))}, but "
            f"config.json means {shape_in_words(shape)}{more}; correct config.json, or download the "
            "weights again"
        )


def _layers(rule: Rule, model: HfModel) -> list[int]:
    """Return the 0-based numbers of the layers that have the parameter of a rule; [0] for a
    parameter outside the layers."""
    if "{layer}" not in rule.megatron:
        return [0]
    moe = {number - 1 for number in model.moe_layer_numbers}
    layers = range(model.sizes.num_layers)
    if rule.layers is not None:
        return list(rule.layers)
    if not rule.megatron.startswith(_MLP):
        return list(layers)
    is_dense = rule.megatron.removeprefix(_MLP).startswith("linear_")
    return [layer for layer in layers if (layer in moe) != is_dense]
