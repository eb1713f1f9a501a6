"""Sparse upcycling: write a dense model as a mixture of experts that computes the same function.

Each MLP becomes several experts that are copies of it (Komatsuzaki et al., arXiv 2212.05055). With a
granularity of N, an expert is a slice with 1/N of the MLP's width, and N experts with equal router
rows form a group that holds the whole MLP once (the virtual groups of He et al., arXiv 2410.07524).
The router is random. Its softmax is over the chosen experts, so a token's gate weights sum to 1.

Dimensions: H hidden size, F width of the dense MLP, E experts, K experts per token, N granularity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mrl.errors import InputError
from parallel.architectures import find_architecture
from parallel.architectures.base import HfConfig, Rule
from parallel.architectures.common import (
    EXPERT,
    LAYER,
    LLAMA3,
    SHARED_EXPERT,
    head_dim,
    query_groups,
    rope_settings,
)
from parallel.checkpoint.hf_writer import copy_files, new_folder, write_safetensors
from parallel.hf_config import LARGEST_COUNTS, HfModel
from parallel.hf_tensors import HfTensors
from parallel.weight_checks import check_weights

MARKER = "mrl_upcycle.json"
"""The file that records the arguments with which a folder was made."""
ROUTER, MLP = f"{LAYER}.mlp.router.weight", f"{LAYER}.mlp"
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
SHARED_GATE = f"{SHARED_EXPERT}.gate_weight"
INITIALIZER_RANGE = 0.02
"""The default of `initializer_range` in transformers."""
LARGEST_STD = 100
"""The largest standard deviation of the router's weights. With a larger one they could overflow."""
LARGEST_SEED = 1 << 32
SHARE = 0.5
"""The factor of the shared expert's output. It is sigmoid(0), because the weights of the shared
expert's gate are 0."""
COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "use_cache", "rope_theta", "rope_scaling", "rope_parameters", "attention_dropout",
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version",
)  # fmt: skip
"""Keys of config.json that have the same meaning in the dense model and in the MoE."""


@dataclass(frozen=True)
class Upcycling:
    """The settings with which a dense model is turned into an MoE."""

    num_experts: int
    """E: the number of experts, where every slice counts as one expert."""
    topk: int
    """K: the number of experts per token, where every slice counts as one expert."""
    granularity: int = 1
    """N: each expert has F / N of the MLP's width. Divides E, K and F."""
    noise: float = 0.0
    """The standard deviation of the noise that is added to each expert's weights, as a fraction of
    the standard deviation of the weight. With noise, the MoE no longer computes exactly the same
    function."""
    like: str | None = None
    """The `model_type` of the MoE; None for the first type that FITS lists for the dense model."""
    seed: int = 0
    """The seed of the router and of the noise."""


def _mixtral(hf: HfConfig, how: Upcycling) -> HfConfig:
    return {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": hf["intermediate_size"] // how.granularity,
        "num_local_experts": how.num_experts,
        "num_experts_per_tok": how.topk,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _qwen3_moe(hf: HfConfig, how: Upcycling) -> HfConfig:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": hf["intermediate_size"],
        "moe_intermediate_size": hf["intermediate_size"] // how.granularity,
        "num_experts": how.num_experts,
        "num_experts_per_tok": how.topk,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(hf: HfConfig, how: Upcycling) -> HfConfig:
    return {
        **_qwen3_moe(hf, how),
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": hf["intermediate_size"],
        "qkv_bias": hf["model_type"] == "qwen2",
    }


TARGETS: dict[str, Callable[[HfConfig, Upcycling], HfConfig]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
"""Maps a `model_type` of the MoE to the function that returns its config.json without the keys in
COPIED."""
FITS: dict[str, tuple[str, ...]] = {
    "llama": ("mixtral", "qwen2_moe"),
    "qwen2": ("qwen2_moe",),
    "qwen3": ("qwen3_moe",),
}
"""Maps a dense `model_type` to the MoE types that have the same attention; the default is the first."""


def upcycle(source: Path, target: Path, how: Upcycling, max_bytes: int = 2 << 30) -> HfModel:
    """Write the dense model folder `source` as the MoE folder `target`, and return the MoE.

    Weights keep their dtype. At any time, one layer and one output file of at most `max_bytes` are
    in memory. The embedding is untied, because SGLang does not tie it in these architectures.
    `target` gets its name only when it is complete.

    Raises InputError if `source` is not a dense model that can become such an MoE, if its weights
    are not those of its config.json or not finite, if the numbers in `how` are inconsistent, or if
    `target` is not empty or cannot be made. Raises DiskFailed if a file cannot be written.
    """
    dense = HfModel.read(source)
    config = moe_config(dense, how)
    architecture = find_architecture(config)
    architecture.transformer_config(config)  # refuses what mrl does not train
    check_weights(dense, deep=True)
    moe = HfModel(target, config, architecture)
    if dense.config.get("quantization_config"):
        raise InputError(
            f"{dense.path}: its weights are stored in fp8; give its folder in bfloat16"
        )
    with HfTensors(dense) as tensors, new_folder(target) as partial:
        _check_exact(tensors, how.granularity)
        write_safetensors(partial, upcycled_tensors(tensors, dense, moe, how), max_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        record = {"source": dense.path.resolve().name, **vars(how), "like": config["model_type"]}
        (partial / MARKER).write_text(json.dumps(record, indent=2) + "\n")
        copy_files(dense.path, partial)
    return HfModel.read(target)


def moe_config(dense: HfModel, how: Upcycling) -> HfConfig:
    """Return config.json of the MoE. Raises InputError as `upcycle` does."""
    hf, kind = dense.config, dense.architecture.model_type
    if dense.moe_layer_numbers:
        raise InputError(f"{dense.path} is a MoE already ({dense.describe()}); give a dense model")
    if kind not in FITS:
        raise InputError(
            f"{dense.path} is a {kind} model; dense models of {', '.join(FITS)} can be upcycled"
        )
    like = FITS[kind][0] if how.like is None else how.like
    if like not in FITS[kind]:
        raise InputError(
            f"--like {like!r}: its attention is not that of a {kind} model; expected "
            f"{' or '.join(FITS[kind])}"
        )
    if like == "mixtral" and rope_settings(hf)["rope_type"] == LLAMA3:
        raise InputError(
            f"{dense.path} has RoPE type {LLAMA3!r}, which SGLang's mixtral ignores; "
            "give --like qwen2_moe"
        )
    if like != "qwen3_moe" and head_dim(hf) * hf["num_attention_heads"] != hf["hidden_size"]:
        raise InputError(
            f"{dense.path}: head_dim {head_dim(hf)} times {hf['num_attention_heads']} heads is not the "
            f"hidden size {hf['hidden_size']}, which SGLang's {like} requires"
        )
    _check_numbers(how, hf["intermediate_size"])
    copied = {key: hf[key] for key in COPIED if key in hf}
    return {
        "model_type": like,
        **copied,
        "num_key_value_heads": query_groups(hf),
        "initializer_range": _initializer_range(dense),
        **TARGETS[like](hf, how),
        "tie_word_embeddings": False,
    }


def _initializer_range(dense: HfModel) -> float:
    """Return the standard deviation of the router's weights."""
    std = dense.config.get("initializer_range")
    if std is None:
        return INITIALIZER_RANGE
    if isinstance(std, bool) or not isinstance(std, int | float) or not 0 < std <= LARGEST_STD:
        raise InputError(
            f"{dense.path}/config.json: initializer_range is {std!r:.30}, expected a positive number "
            f"of at most {LARGEST_STD}, because it is the standard deviation of the router's weights"
        )
    return float(std)


def _check_numbers(how: Upcycling, ffn_size: int) -> None:
    for flag, number in (
        ("--experts", how.num_experts),
        ("--top-k", how.topk),
        ("--granularity", how.granularity),
    ):
        if number < 1:
            raise InputError(f"{flag} {number}: expected at least 1")
    for what, number in (
        ("--experts", how.num_experts),
        ("--top-k", how.topk),
        ("the MLP's width", ffn_size),
    ):
        if number % how.granularity:
            raise InputError(
                f"--granularity {how.granularity} does not divide {what} {number}; experts and top-k "
                "count slices, so that E / N groups hold the MLP and a token chooses K / N of them"
            )
    if how.topk > how.num_experts:
        raise InputError(f"--top-k {how.topk} is above --experts {how.num_experts}")
    if how.num_experts > LARGEST_COUNTS["num_experts"]:
        raise InputError(
            f"--experts {how.num_experts}: expected at most {LARGEST_COUNTS['num_experts']}"
        )
    if not 0 <= how.seed < LARGEST_SEED:
        raise InputError(f"--seed {how.seed}: expected at least 0 and less than {LARGEST_SEED}")
    if not 0 <= how.noise < math.inf:
        raise InputError(f"--noise {how.noise}: expected a finite number of at least 0")


def _check_exact(tensors: HfTensors, granularity: int) -> None:
    """Raise InputError if `granularity` times a down projection is not exact in the weights' dtype."""
    half = {tensors.dtype(name) for name in tensors.names} & {"BF16", "F16"}
    if half and granularity & (granularity - 1):
        raise InputError(
            f"--granularity {granularity}: {granularity} times a weight is not exact in {half.pop()}, "
            "so the MoE would compute something else; give a power of 2"
        )


def upcycled_tensors(
    tensors: HfTensors, dense: HfModel, moe: HfModel, how: Upcycling
) -> Iterator[tuple[str, Tensor]]:
    """Yield the HF tensors of the MoE, layer by layer.

    Parameters are compared by their Megatron names. Those that both models have are copied. Experts
    are made from the dense MLP, the router is random, and the weights of a shared expert's gate are
    0. If the dense model ties its output layer, the MoE's output layer is a copy of the embedding.
    """
    table = moe.architecture.rules(moe.config)
    known = {rule.megatron: rule.hf for rule in dense.architecture.rules(dense.config)}
    outside = [rule for rule in table if "{layer}" not in rule.megatron]
    inside = [rule for rule in table if "{layer}" in rule.megatron]
    for rule in outside:
        is_tied = rule.megatron == OUTPUT and OUTPUT not in known
        hf = known[EMBEDDING if is_tied else rule.megatron]
        yield from ((name, tensors[source]) for name, source in zip(rule.hf, hf, strict=True))
    for layer in range(dense.sizes.num_layers):
        yield from _layer_tensors(tensors, inside, known, layer, moe, how)


def _layer_tensors(
    tensors: HfTensors,
    table: list[Rule],
    known: dict[str, tuple[str, ...]],
    layer: int,
    moe: HfModel,
    how: Upcycling,
) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(how.seed * 100_003 + layer)
    mlp = {
        part: [tensors[name.format(layer=layer)] for name in known[f"{MLP}.{part}.weight"]]
        for part in ("linear_fc1", "linear_fc2")
    }
    dtype, hidden_size = mlp["linear_fc2"][0].dtype, moe.config["hidden_size"]
    has_shared = any(rule.megatron == SHARED_GATE for rule in table)
    scale = how.granularity * (1 - SHARE if has_shared else 1.0)
    for rule in table:
        name = rule.megatron
        if name == ROUTER:
            rows = torch.randn(how.num_experts // how.granularity, hidden_size, generator=generator)
            router = (rows * moe.config["initializer_range"]).repeat_interleave(
                how.granularity, dim=0
            )
            yield rule.hf[0].format(layer=layer), router.to(dtype)
        elif name == SHARED_GATE:
            yield rule.hf[0].format(layer=layer), torch.zeros(1, hidden_size, dtype=dtype)
        elif name.startswith(EXPERT):
            weights = mlp[name.removeprefix(f"{EXPERT}.").removesuffix(".weight")]
            is_down = len(weights) == 1
            for expert in range(how.num_experts):
                for hf, weight in zip(rule.hf, weights, strict=True):
                    part = weight.chunk(how.granularity, dim=int(is_down))[expert % how.granularity]
                    part = part * scale if is_down else part
                    yield (
                        hf.format(layer=layer, expert=expert),
                        _with_noise(part, how.noise, generator),
                    )
        elif name.startswith(SHARED_EXPERT):
            weights = mlp[name.removeprefix(f"{SHARED_EXPERT}.").removesuffix(".weight")]
            for hf, weight in zip(rule.hf, weights, strict=True):
                yield hf.format(layer=layer), weight
        elif not name.startswith(MLP):  # the dense MLP, which no layer of the MoE has
            for hf, source in zip(rule.hf, known[name], strict=True):
                yield hf.format(layer=layer), tensors[source.format(layer=layer)]


def _with_noise(weight: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    if not noise:
        return weight
    drawn = torch.randn(weight.shape, generator=generator) * (noise * weight.float().std())
    return (weight.float() + drawn).to(weight.dtype)


def largest_difference(source: Path, target: Path, num_tokens: int = 64, seed: int = 0) -> float:
    """Return the largest absolute difference between the log-probs that two model folders give to
    `num_tokens` random tokens, in fp64 with transformers. The models are loaded one after the other."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = HfModel.read(source).sizes.vocab_size
    ids = torch.randint(vocab_size, (num_tokens + 1,), generator=generator)
    first, second = (_logprobs(folder, ids) for folder in (source, target))
    return float((first - second).abs().max())


def _logprobs(folder: Path, ids: Tensor) -> Tensor:
    """Return the log-probs f64[T-1] of tokens 1 to T-1 of `ids` i64[T]."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
