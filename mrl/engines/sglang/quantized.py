"""What SGLang needs for quantised weights (`rollout.quantization`): its arguments, the names of its
modules, and the models that it can run with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mrl.config.rollout import SharedRolloutConfig
from mrl.errors import InputError
from mrl.quantization import fp8_config, is_quantized

PACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Maps modules of Hugging Face's models to the SGLang module that contains them."""
FP8_GPUS = (8, 9)
"""The lowest compute capability on which SGLang computes with fp8 weights as they are loaded. On older
GPUs it packs them for Marlin (`can_auto_enable_marlin_fp8` in layers/quantization/fp8_utils.py)."""
BLACKWELL = (10, 11)
"""The major compute capabilities of Blackwell GPUs on which SGLang's default is DeepGEMM (B200: 10.0).
With 12 (RTX), its default is Triton or CUTLASS, which take the weights as they are."""
DEEP_GEMM = {
    "fp8_gemm_runner_backend": ("auto", "deep_gemm"),
    "moe_runner_backend": ("deep_gemm",),
    "moe_a2a_backend": ("deepep", "mooncake", "nixl"),
}
"""Values of fields of ServerArgs with which SGLang may compute with DeepGEMM. The first value of
`fp8_gemm_runner_backend` is its default."""
MODEL_TYPES = ("llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""The architectures whose quantised modules are known, by `model_type` of config.json."""


def engine_module(name: str) -> str:
    """Return the name of SGLang's module that contains the quantised weight `name`. All experts of a
    layer are in one module, `...experts`."""
    *path, module, _ = name.split(".")
    if "experts" in path:
        return ".".join(path[: path.index("experts") + 1])
    return ".".join([*path, PACKED.get(module, module)])


def engine_modules(names: Iterable[str]) -> set[str]:
    """Return the names of SGLang's modules that contain the quantised weights among `names`."""
    return {engine_module(name) for name in names if is_quantized(name, 2)}


def quantization_settings(quantization: str, server_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ServerArgs for an engine on GPUs whose weights are quantised. The engine
    does not read the checkpoint, whose weights are in another format. It gets all weights in the
    first update.

    This has not run on a GPU yet.
    """
    if quantization == "none":
        return {}
    given = json.loads(server_args.get("json_model_override_args") or "{}")
    overrides = json.dumps({**given, "quantization_config": fp8_config(quantization)})
    return {"quantization": "fp8", "load_format": "dummy", "json_model_override_args": overrides}


def dequantized_settings(config: Any, server_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ServerArgs for an engine on CPUs if the checkpoint's weights are stored in
    fp8, and otherwise none. The engine holds them dequantised, from the first update on."""
    if not getattr(config, "quantization_config", None):
        return {}
    given = json.loads(server_args.get("json_model_override_args") or "{}")
    overrides = json.dumps({**given, "quantization_config": None})
    return {"load_format": "dummy", "json_model_override_args": overrides}


def check_quantization(
    config: Any, rollout: SharedRolloutConfig, weight_sync: str, *, on_gpu: bool
) -> None:
    """Raise InputError if an engine with `rollout.quantization` cannot run the model or be updated.

    `config` is the content of config.json. `weight_sync` is the value of the recipe's key
    `rollout.weight_sync`.
    """
    key = f"rollout.quantization={rollout.quantization}"
    stored = getattr(config, "quantization_config", None)
    is_known = config.model_type in MODEL_TYPES
    if stored and not is_known:
        raise InputError(
            f"{key} with model {config.model_type!r}: the weights of model.path are stored in fp8, and "
            f"engines hold quantised weights of {', '.join(MODEL_TYPES)} only; give the weights in "
            "bfloat16, and set it to none"
        )
    if stored and rollout.quantization not in ("fp8_block", "fp8_block_ue8m0"):
        raise InputError(
            f"{key}: the weights of model.path are stored in fp8, and the engine would start with "
            "such weights; set rollout.quantization=fp8_block, or give the weights in bfloat16"
        )
    if rollout.quantization == "none":
        return
    if rollout.quantization == "int8" and on_gpu:
        raise InputError(
            f"{key} on a GPU: SGLang's int8 layers cannot be loaded again after their start; set "
            "rollout.quantization=fp8_block"
        )
    if not is_known:
        raise InputError(
            f"{key} with model {config.model_type!r}: which of its layers SGLang quantises is known "
            f"for {', '.join(MODEL_TYPES)} only; set it to none"
        )
    if weight_sync != "tensor":
        raise InputError(
            f"{key} with rollout.weight_sync={weight_sync}: quantised weights are sent by tensor only; "
            "leave rollout.weight_sync at tensor"
        )
    if rollout.batch_invariant or getattr(rollout, "true_on_policy", False):
        raise InputError(
            f"{key} with rollout.batch_invariant or rollout.true_on_policy: their layers are not "
            "quantised; turn one of the keys off"
        )
    given = json.loads(rollout.server_args.get("json_model_override_args") or "{}")
    if not isinstance(given, dict) or "quantization_config" in given:
        raise InputError(
            f"{key} with rollout.server_args.json_model_override_args {given!r}: expected a JSON "
            "object without quantization_config, which mrl sets; leave it out"
        )
    if "load_format" in rollout.server_args:
        raise InputError(
            f"{key} with rollout.server_args.load_format: mrl sets it, because the checkpoint is in "
            "another format; leave it out"
        )


def check_gpu(rollout: SharedRolloutConfig, capability: tuple[int, int]) -> None:
    """Raise InputError if SGLang would rewrite fp8 weights on GPUs of this compute capability.

    SGLang could then not load the next version of the weights, and digests could not be compared.
    On Blackwell, SGLang loads fp8 blocks for DeepGEMM in another form
    (`requant_block_scale_ue8m0_for_deepgemm` in layers/quantization/fp8_utils.py of 0.5.23): it
    quantises the weights again with scales that are powers of two, and packs four of these scales
    into each int32, [N, ceil(K / 512)] for a weight [N, K]. The values of `fp8_block_ue8m0` survive
    that, but its scales are packed too. The loader of a layer then refuses float32 scales, because
    their shape is another one.

    This has not run on a GPU yet.
    """
    key = f"rollout.quantization={rollout.quantization}"
    number = ".".join(map(str, capability))
    if capability < FP8_GPUS:
        raise InputError(
            f"{key} on a GPU of compute capability {number}: SGLang would repack the weights, and "
            "could not load the next version; expected at least 8.9 (L40S, H100); set it to none"
        )
    given = {name: rollout.server_args.get(name) or "auto" for name in DEEP_GEMM}
    used = [f"{name}={given[name]}" for name, values in DEEP_GEMM.items() if given[name] in values]
    if capability[0] in BLACKWELL and used:
        raise InputError(
            f"{key} on a GPU of compute capability {number} with {' and '.join(used)}: SGLang's "
            "DeepGEMM would rewrite weights and scales, and could not load the next version; set "
            "rollout.server_args to {fp8_gemm_runner_backend: triton, moe_runner_backend: triton}"
        )
