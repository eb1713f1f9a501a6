"""The tables of `megatron:` beside the installed dataclasses, and how values are read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mrl.errors import InputError
from parallel.dims import ParallelDims
from parallel.options.fields import ALLOWED, ANYWHERE, NEEDS_CUDA, NEEDS_ENGINE, OWNED, REFUSED
from parallel.options.read import installed_fields, read_options
from parallel.options.rules import SWITCHES, Surroundings, check_rules

TABLES = {
    "owned": list(OWNED),
    "refused": [name for names in REFUSED.values() for name in names],
    "allowed": [*ANYWHERE, *NEEDS_CUDA, *NEEDS_ENGINE],
}
ONLY_IN_0_19 = {
    "adaptive_muon_beta2", "adaptive_muon_eps", "adaptive_muon_moment2_method",
    "cuda_graph_modules", "delay_offload_until_cuda_graph",
    "experimental_attention_variant_loss_scale_func", "fp4_param_gather",
    "fsdp_all_gather_in_start_param_sync", "fsdp_db_use_persist_buf_on_alloc_fail",
    "grad_norm_skip_threshold", "inference_cuda_graph_scope",
    "inference_disable_triton_nvls_kernels", "inference_grouped_gemm_backend",
    "inference_moe_disable_fused_quant_kernels", "inference_moe_token_dispatcher_type",
    "lion_beta1", "lion_beta2", "megatron_fsdp_cuda_graph_mode",
    "megatron_fsdp_enable_fine_grained_param_gather", "megatron_fsdp_grad_comm_dtype",
    "megatron_fsdp_main_grads_dtype", "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_max_pool_double_buffer", "megatron_fsdp_use_decoupled_grad",
    "moe_expert_rank_capacity_factor", "moe_grad_scale_func",
    "moe_pad_experts_for_cuda_graph_inference", "moe_router_force_biased",
    "moe_single_grouped_bias", "moe_single_grouped_weight", "mtp_grad_scale_func",
    "muon_coefficient_type", "muon_nesterov", "muon_scalar_optimizer",
    "nccl_all_reduce_for_prefill", "optimizer_cuda_graph",
    "overlap_dispatch_backward_with_experts_wgrad", "soap_precondition_frequency",
    "soap_shampoo_beta", "soap_use_kl_shampoo", "use_layer_wise_distributed_optimizer",
}  # fmt: skip
"""Found in the dataclasses of the 0.19.2 wheel; the installed version lacks them."""


def test_every_field_of_the_installed_version_is_in_one_table() -> None:
    listed = [name for names in TABLES.values() for name in names]
    assert len(listed) == len(set(listed))
    assert installed_fields().keys() - set(listed) == set()
    assert set(listed) - installed_fields().keys() <= ONLY_IN_0_19
    switched = {name for names in SWITCHES.values() for name in names}
    assert switched | SWITCHES.keys() <= ALLOWED


def test_a_field_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**installed_fields(), "warp_drive": {"transformer": bool}}
    monkeypatch.setattr("parallel.options.read.installed_fields", lambda: fields)
    with pytest.raises(InputError, match=r"megatron.warp_drive: .* was not read beside it"):
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
