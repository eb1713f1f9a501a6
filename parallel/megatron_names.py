"""The private names of megatron-core that mrl replaces or reads. Other modules access them through
`MEGATRON`.

Public names, which mrl imports as usual, are not listed: `make compat` reads them from the imports.
"""

from __future__ import annotations

from functools import partial

from mrl.system.releases import SUPPORTED, Name, NameTable, since

_CORE = "megatron.core"
_MOE, _PARALLEL = f"{_CORE}.transformer.moe", f"{_CORE}.tensor_parallel"
always = partial(since, SUPPORTED["megatron-core"][0])
"""Makes an entry of NAMES for a name whose path is the same in all supported releases."""

NAMES: dict[str, Name] = {
    # cpu_mode.py
    "_get_cuda_rng_state": always(f"{_PARALLEL}.random._get_cuda_rng_state"),
    "_set_cuda_rng_state": always(f"{_PARALLEL}.random._set_cuda_rng_state"),
    "random.HAVE_TE": always(f"{_PARALLEL}.random.HAVE_TE"),
    "is_te_min_version": always(f"{_CORE}.optimizer.optimizer_config.is_te_min_version"),
    "maybe_move_tensor_to_cpu": always(
        f"{_MOE}.moe_utils.maybe_move_tensor_to_cpu", "tensor", "as_numpy", "record_stream"
    ),
    "token_dispatcher.maybe_move_tensor_to_cpu": always(
        f"{_MOE}.token_dispatcher.maybe_move_tensor_to_cpu"
    ),
    "_gather_along_first_dim": always(
        f"{_PARALLEL}.mappings._gather_along_first_dim", "input_", "group", "output_split_sizes"
    ),
    "_reduce_scatter_along_first_dim": always(
        f"{_PARALLEL}.mappings._reduce_scatter_along_first_dim",
        "input_", "group", "input_split_sizes",
    ),
    "_get_sub_optimizer_param_groups": always(
        f"{_CORE}.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer."
        "_get_sub_optimizer_param_groups",
        "self", "offload_fraction",
    ),
    "extensions.HAVE_TE": always(f"{_CORE}.extensions.transformer_engine.HAVE_TE"),
    "latent.HAVE_TE": always(f"{_CORE}.transformer.multi_latent_attention.HAVE_TE"),
    # layers/specs.py finds MoE layers by this class in a layer's spec.
    "MoELayer": always(f"{_MOE}.moe_layer.MoELayer"),
    # layers/dispatch.py: releases that have it compute the shared experts during the all-to-all.
    "SharedExpertMLP.wait_current_stream": since(
        "0.19.2", f"{_MOE}.shared_experts.SharedExpertMLP.wait_current_stream", "self"
    ),
    # kept_gradients.py, megatron_model.py
    "_ParamAndGradBucketGroup": always(
        f"{_CORE}.distributed.param_and_grad_buffer._ParamAndGradBucketGroup",
        attributes=("param_gather_dispatched", "param_gather_handle"),
    ),
}  # fmt: skip


MEGATRON = NameTable("megatron-core", NAMES)
