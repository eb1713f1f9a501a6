"""What SGLang cannot do, or would compute otherwise than config.json says, without a message."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from mrl.errors import InputError
from mrl.system.releases import numbers

ROUTES_SINCE = {"mixtral": "0.5.22", "olmoe": "0.5.22"}
"""For models that passed no layer numbers to the recorder of routes: the first SGLang release in which
they do."""
UNTIED = ("glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next")
"""The model types whose output layer SGLang never ties to the embedding."""
OLMOE_EPS = 1e-5
"""The epsilon of all norms of SGLang's OLMoE, whatever config.json says."""


GPT_OSS_SINCE = "0.5.23"
"""The first SGLang release whose gpt-oss mrl's plug-in (plugins/gpt_oss) was made for."""


def refuse_unfaithful(
    config: Any,
    *,
    on_gpu: bool,
    return_routes: bool,
    num_ranks: int = 1,
    release: str | None = None,
) -> None:
    """Raise InputError for a model that SGLang would run wrongly, or not at all.

    `config` has the keys of config.json, `num_ranks` is the number of ranks of an engine, and `release`
    is the release of SGLang, by default the installed one. SGLang has these faults:

    - On CPUs Qwen3-Next needs kernels of sgl-kernel's build for AMX, which mrl's CPU engine replaces.
    - The Qwen MoE models make every layer sparse, whatever config.json says. The experts of a dense
      layer keep their random initialisation, and nothing is logged.
    - Attention on CPUs uses the cached latents of a DeepSeek prompt as if they were values.
    - The indexer of DeepSeek-V3.2 has kernels for GPUs and NPUs only (`layers/attention/dsa`).
    - The models in UNTIED do not tie the output layer to the embedding. Mixtral and Qwen2-MoE ignore
      head_dim.
    - Before 0.5.22, Mixtral and OLMoE passed no layer numbers to the recorder of routes.
    - Before GPT_OSS_SINCE, gpt-oss cannot get the weights of single experts.
    - OLMoE has fixed values for some keys, and normalises the queries and keys of one rank only
      (`_findings_of_olmoe`).
    """
    findings = (
        *_findings(config, on_gpu, return_routes, release or version("sglang")),
        *(_findings_of_olmoe(config, num_ranks) if config.model_type == "olmoe" else ()),
    )
    for wrong, text in findings:
        if wrong:
            raise InputError(f"model {config.model_type!r}{text}")


def _findings(
    config: Any, on_gpu: bool, return_routes: bool, release: str
) -> Iterator[tuple[Any, str]]:
    """Yield pairs (whether something is wrong, the message after the model type)."""
    kind, head_dim = config.model_type, getattr(config, "head_dim", None)
    since = ROUTES_SINCE.get(kind, "0")
    yield (
        return_routes and numbers(release) < numbers(since),
        f": SGLang {release} cannot record its routes; install SGLang {since} or later, or set "
        "moe.routing_replay=r2 or off",
    )
    yield (
        kind == "gpt_oss" and numbers(release) < numbers(GPT_OSS_SINCE),
        f": mrl has no plug-in for its experts and sinks in SGLang {release}; install SGLang "
        f"{GPT_OSS_SINCE} or later",
    )
    yield (
        kind == "deepseek_v3" and not on_gpu,
        ": SGLang's latent attention is wrong on a CPU; roll it out on GPUs",
    )
    yield (
        kind == "deepseek_v32" and not on_gpu,
        ": SGLang's indexer of sparse attention runs on CUDA, HIP and NPU only (forward_native of "
        "dsa_indexer.py raises NotImplementedError); roll it out on GPUs",
    )
    yield (
        kind == "qwen3_next" and not on_gpu,
        ": on a CPU SGLang computes its gated delta nets only with its own build of sgl-kernel for AMX "
        "(chunk_gated_delta_rule_cpu), which mrl's CPU engine does not have; roll it out on GPUs",
    )
    yield (
        kind in UNTIED and getattr(config, "tie_word_embeddings", False),
        " with tie_word_embeddings: SGLang would not tie its output layer; save the model with "
        "tie_word_embeddings=false and the embedding as lm_head.weight",
    )
    if kind in ("mixtral", "qwen2_moe") and head_dim:
        heads, hidden_size = config.num_attention_heads, config.hidden_size
        yield (
            head_dim * heads != hidden_size,
            f" with head_dim {head_dim}: SGLang would take hidden_size / num_attention_heads, "
            f"{hidden_size} / {heads}",
        )
    dense = list(getattr(config, "mlp_only_layers", None) or [])
    sparse_step = getattr(config, "decoder_sparse_step", None) or 1
    yield (
        kind in ("qwen2_moe", "qwen3_moe", "qwen3_next") and (dense or sparse_step != 1),
        f" with mlp_only_layers={dense} and decoder_sparse_step={sparse_step}: SGLang would run every "
        "layer as MoE; expected [] and 1",
    )


def refuse_unread_keys(config: Any) -> None:
    """Raise InputError if SGLang would not find a key where a Qwen3-Next's config.json has it.

    `config` has the keys of config.json as they are in the file. SGLang has a class of its own for them
    (`configs/qwen3_next.py`): it reads `rope_theta` and `partial_rotary_factor` at the top level, where
    transformers 4 wrote them, with defaults, drops the scaling of RoPE, and reads
    `full_attention_interval` in place of `layer_types`.
    """
    if config.model_type != "qwen3_next":
        return
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    interval = getattr(config, "full_attention_interval", None)
    layers = range(1, config.num_hidden_layers + 1)
    kinds = ["linear_attention" if interval and n % interval else "full_attention" for n in layers]
    for wrong, text in (
        *(
            (
                key in rope and getattr(config, key, default) != rope[key],
                f"{key} {rope.get(key)} in its RoPE settings: SGLang would take "
                f"{getattr(config, key, default)}; write it at the top level of config.json, too",
            )
            for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 0.25))
        ),
        (kind != "default", f"RoPE type {kind!r}: SGLang would leave it out; expected 'default'"),
        (
            interval is None,
            "no full_attention_interval, from which SGLang derives the kinds of layers; write it into "
            "config.json, 4 in Qwen3-Next",
        ),
        (
            (getattr(config, "layer_types", None) or kinds) != kinds,
            f"full_attention_interval {interval}, from which SGLang derives other kinds of layers than "
            "layer_types has; expected the same",
        ),
    ):
        if wrong:
            raise InputError(f"model 'qwen3_next' with {text}")


def _findings_of_olmoe(config: Any, num_ranks: int) -> Iterator[tuple[Any, str]]:
    """Yield pairs as `_findings` does, for OLMoE (`models/olmoe.py` of SGLang).

    The norms of queries and keys have the model's width on every rank, but a rank's projections have
    only its own heads, and SGLang does not sum over ranks.
    """
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None) or heads
    eps = getattr(config, "rms_norm_eps", OLMOE_EPS)
    yield (
        num_ranks > 1,
        f" on {num_ranks} ranks: SGLang normalises queries and keys over all heads on one rank only; "
        "set rollout.tensor_parallel_size=1",
    )
    yield (
        groups != heads,
        f" with num_key_value_heads {groups}: SGLang supports only as many as num_attention_heads, "
        f"{heads}",
    )
    yield (
        getattr(config, "norm_topk_prob", False),
        " with norm_topk_prob: SGLang would not renormalise the gate weights; expected false",
    )
    yield (
        eps != OLMOE_EPS,
        f" with rms_norm_eps {eps}: SGLang would take {OLMOE_EPS}, whatever config.json says",
    )
