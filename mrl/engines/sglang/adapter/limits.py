"""Checks, before an engine starts, that SGLang can serve an adapter in the engine."""

from __future__ import annotations

from collections.abc import Collection

from mrl.config import RolloutConfig
from mrl.config.adapter import Adapter, AdapterLimits
from mrl.errors import InputError

SGLANG_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Mixtral's names of an expert's modules, mapped to SGLang's names of these modules in adapters."""
SERVED = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"}
    | {"kv_b_proj", "gate_proj", "up_proj", "down_proj", *SGLANG_NAMES}
)
"""The modules whose adapters SGLang serves and mrl compares by digest."""
ADVICE = "leave it out of lora.targets, or set lora.rollout=merged"


def refuse_modules(adapter: Adapter, modules: Collection[str]) -> None:
    """Raise InputError if SGLang cannot serve an adapter with these target modules on this model.
    `modules` has the last part of the Hugging Face name of each module, such as `q_proj`."""
    for name in adapter.target_modules:
        if name not in SERVED:
            raise InputError(
                f"lora.rollout=adapter: SGLang serves no adapter of {name!r}, only of "
                f"{', '.join(sorted(SERVED))}; {ADVICE}"
            )
    if "q_proj" in adapter.modules and "k_proj" not in modules:
        raise InputError(
            "lora.rollout=adapter: SGLang serves an adapter of 'q_proj' only with 'k_proj' and "
            f"'v_proj', which this model does not have; {ADVICE}"
        )


def refuse_layout(
    config: RolloutConfig, adapter: Adapter | AdapterLimits, num_nodes: int, *, on_gpu: bool
) -> None:
    """Raise InputError if an engine with this configuration, on `num_nodes` nodes, cannot serve
    `adapter`. `adapter` may also be the common limits of several adapters."""
    if num_nodes > 1:
        raise InputError(
            f"lora.rollout=adapter: the engine spans {num_nodes} nodes, and an adapter goes through "
            "the memory of one; lower rollout.tensor_parallel_size, or set lora.rollout=merged"
        )
    if config.data_parallel_attention_size > 1 and adapter.experts != "none":
        raise InputError(
            f"lora.rollout=adapter: with rollout.data_parallel_attention_size="
            f"{config.data_parallel_attention_size} experts compute the tokens of all replicas, but "
            "SGLang knows only the adapters of a replica's own tokens; set lora.experts=none, "
            "lora.rollout=merged, or leave the size out"
        )
    if config.data_parallel_attention_size > 1 and not on_gpu:
        raise InputError(
            f"lora.rollout=adapter: with rollout.data_parallel_attention_size="
            f"{config.data_parallel_attention_size} SGLang serves adapters on GPUs only; set "
            "lora.rollout=merged, or leave the size out"
        )
    if config.true_on_policy:
        raise InputError(
            "lora.rollout=adapter with rollout.true_on_policy: SGLang adds the update in another order "
            "than the trainer, so the bits differ; set lora.rollout=merged"
        )
