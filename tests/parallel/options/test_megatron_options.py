"""The tables of `megatron:` beside the installed dataclasses, and how values are read."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest
import torch

from mrl.errors import InputError
from mrl.system.releases import numbers
from parallel.dims import ParallelDims
from parallel.options.fields import (
    ALLOWED,
    ANYWHERE,
    NEEDS_CUDA,
    NEEDS_TRANSFORMER_ENGINE,
    OWNED,
    REFUSED,
)
from parallel.options.read import installed_fields, read_options
from parallel.options.rules import SWITCHES, Surroundings, check_rules

TABLES = {
    "owned": list(OWNED),
    "refused": [name for names in REFUSED.values() for name in names],
    "allowed": [*ANYWHERE, *NEEDS_CUDA, *NEEDS_TRANSFORMER_ENGINE],
}
ONLY_IN_0_19 = {
    "activation_offload_fraction", "adaptive_muon_beta2", "adaptive_muon_eps",
    "adaptive_muon_moment2_method", "cpu_offloading_retain_pinned_cpu_buffers",
    "cuda_graph_modules", "delay_offload_until_cuda_graph", "delta_offload_bytes_across_pp_ranks",
    "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32", "dsa_indexer_rope_interleaved",
    "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu", "dsa_indexer_skip_topk_offset",
    "dsa_indexer_topk_freq", "dsa_kernel_backend",
    "experimental_attention_variant_loss_scale_func", "expert_gtp_weight_remat_size",
    "expert_tensor_parallel_num_weight_shards", "fine_grained_offloading_max_inflight_offloads",
    "flash_attention_version", "fp4_param_gather", "fp8_output_proj",
    "fsdp_all_gather_in_start_param_sync", "fsdp_db_use_persist_buf_on_alloc_fail",
    "fused_residual_rmsnorm", "grad_norm_skip_threshold", "gtp_weight_remat_size",
    "high_priority_a2a_comm_stream", "inference_cuda_graph_scope",
    "inference_disable_triton_nvls_kernels", "inference_grouped_gemm_backend",
    "inference_moe_disable_fused_quant_kernels", "inference_moe_token_dispatcher_type",
    "lion_beta1", "lion_beta2", "mamba_training_ssm_states_dtype",
    "megatron_fsdp_cuda_graph_mode", "megatron_fsdp_enable_fine_grained_param_gather",
    "megatron_fsdp_grad_comm_dtype", "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_main_params_dtype", "megatron_fsdp_max_pool_double_buffer",
    "megatron_fsdp_use_decoupled_grad", "mla_down_proj_fusion", "mlp_chunks_for_training",
    "moe_expert_rank_capacity_factor", "moe_flex_dispatcher_num_sms", "moe_grad_scale_func",
    "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute",
    "moe_hybridep_num_sms_preprocessing", "moe_hybridep_pad_uneven_dispatch_inputs",
    "moe_mlp_glu_interleave_size", "moe_ncclep_static_shape", "moe_ncclep_zero_copy",
    "moe_pad_experts_for_cuda_graph_inference", "moe_paged_stash",
    "moe_paged_stash_buffer_size_factor_cpu", "moe_paged_stash_buffer_size_factor_cuda",
    "moe_paged_stash_page_size", "moe_permute_fusion_into_hybridep", "moe_router_force_biased",
    "moe_router_quantile_balancing_ema", "moe_shared_expert_glu_interleave_size",
    "moe_single_grouped_bias", "moe_single_grouped_weight", "mtp_detach_heads",
    "mtp_grad_scale_func", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer",
    "muon_coefficient_type", "muon_nesterov", "muon_scalar_optimizer", "mup_attn_scale_power",
    "mup_base_head_dim", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult",
    "mup_width_mult", "nccl_all_reduce_for_prefill", "num_buckets", "optimizer_cuda_graph",
    "overlap_dispatch_backward_with_experts_wgrad",
    "param_name_patterns_for_fp32_local_accumulation", "soap_precondition_frequency",
    "soap_shampoo_beta", "soap_use_kl_shampoo", "tensor_parallel_num_weight_shards",
    "use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert",
    "use_layer_wise_distributed_optimizer", "use_mup", "use_transformer_engine_op_fuser",
}  # fmt: skip
ONLY_IN_0_16 = {
    "async_tensor_model_parallel_allreduce", "moe_extended_tp", "moe_use_legacy_grouped_gemm",
    "muon_use_nesterov", "preserve_fp32_weights",
}  # fmt: skip
"""Found in the dataclasses of one supported release and not in those of the other."""


def test_every_field_of_the_installed_version_is_in_one_table() -> None:
    listed = [name for names in TABLES.values() for name in names]
    assert len(listed) == len(set(listed))
    assert installed_fields().keys() - set(listed) == set()
    is_older = numbers(importlib.metadata.version("megatron-core")) < (0, 19)
    other, own = (ONLY_IN_0_19, ONLY_IN_0_16) if is_older else (ONLY_IN_0_16, ONLY_IN_0_19)
    assert set(listed) - installed_fields().keys() == other
    assert own <= installed_fields().keys()
    assert not ALLOWED & (ONLY_IN_0_16 | ONLY_IN_0_19)
    switched = {name for names in SWITCHES.values() for name in names}
    assert switched | SWITCHES.keys() <= ALLOWED


def test_a_field_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**installed_fields(), "warp_drive": {"transformer": bool}}
    monkeypatch.setattr("parallel.options.read.installed_fields", lambda: fields)
    with pytest.raises(InputError, match=r"megatron.warp_drive: .* no one has checked that replay"):
        read_options({"warp_drive": True})


GOOD: list[tuple[str, Any, str, Any]] = [
    ("exp_avg_dtype", "uint8", "optimizer", torch.uint8),
    ("optimizer_offload_fraction", 1, "optimizer", 1.0),
    ("bucket_size", None, "ddp", None),
    ("recompute_modules", ["moe", "mlp"], "transformer", ["moe", "mlp"]),
    ("cp_comm_type", ["p2p"], "transformer", ["p2p"]),
    ("moe_router_dtype", "fp64", "transformer", "fp64"),
    ("overlap_grad_reduce", True, "ddp", True),
]


@pytest.mark.parametrize(("name", "value", "part", "parsed"), GOOD)
def test_values_become_what_the_dataclass_takes(
    name: str, value: Any, part: str, parsed: Any
) -> None:
    found = getattr(read_options({name: value}), part)[name]
    assert found == parsed
    assert type(found) is type(parsed)


def test_a_name_in_two_dataclasses_goes_to_both() -> None:
    options = read_options({"overlap_param_gather": True, "fp8_recipe": "blockwise"})
    assert options.ddp == {"overlap_param_gather": True}
    assert options.optimizer == {"overlap_param_gather": True, "fp8_recipe": "blockwise"}
    assert options.transformer == {"fp8_recipe": "blockwise"}
    member = read_options({"attention_backend": "flash"}).transformer["attention_backend"]
    assert member.name == "flash"


@pytest.mark.parametrize("value", ["true", 1, None, [True]])
def test_a_flag_is_true_or_false(value: Any) -> None:
    with pytest.raises(InputError, match="expected true or false") as error:
        read_options({"overlap_grad_reduce": value})
    assert str(error.value).count("\n") == 0


def test_native_experts_are_not_offloaded_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron names them in TEGroupedMLP only: with other experts nothing would move."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    around = Surroundings(
        dims=ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1),
        implementation="local",
        dtype=torch.bfloat16,
        distributed_optimizer=True,
        recompute=False,
        replays_order=False,
        true_on_policy=False,
        has_shared_experts=False,
    )
    given = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    check_rules(given, around)
    with pytest.raises(InputError, match="offload_modules has moe_act, but only TransformerEngine"):
        check_rules({**given, "offload_modules": ["core_attn", "moe_act"]}, around)
    engine = dataclasses.replace(around, implementation="transformer_engine")
    check_rules({**given, "offload_modules": ["moe_act"]}, engine)
