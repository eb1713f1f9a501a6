"""The fields of Megatron's dataclasses that a recipe may set under `megatron:`, and the reasons why
it may not set the other fields.

The tables are based on a reading of how megatron-core 0.16.1 uses each field. Fields that only
0.19.2 has are never allowed. A field that is in no table belongs to a version of megatron-core that
has not been read, and is refused for that reason. tests/parallel/options/test_megatron_options.py
compares the tables with the installed dataclasses.
"""

from __future__ import annotations

MODEL = "the model's config.json"

OWNED: dict[str, str] = {
    **{name: f"parallel.{name}" for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_token_dispatcher_type")},
    "sequence_parallel": "parallel.tensor_model_parallel_size, which turns it on above 1",
    "moe_extended_tp": "parallel.expert_tensor_parallel_size",
    "moe_enable_deepep": "parallel.moe_token_dispatcher_type=flex",
    "num_layers_in_first_pipeline_stage": "parallel.decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "parallel.decoder_last_pipeline_num_layers",
    **dict.fromkeys((
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split"),
        "parallel.decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers"),
    "moe_router_load_balancing_type": "moe.load_balancing_type",
    "moe_aux_loss_coeff": "moe.aux_loss_coeff",
    "moe_z_loss_coeff": "moe.z_loss_coeff",
    "moe_router_bias_update_rate": "moe.expert_bias_update_rate",
    "moe_router_quantile_balancing_ema": "moe.load_balancing_type",
    "moe_enable_routing_replay": "moe.routing_replay",
    **dict.fromkeys(("params_dtype", "bf16", "pipeline_dtype", "autocast_dtype"), "model.dtype"),
    "transformer_impl": "model.transformer_impl",
    "moe_grouped_gemm": "model.transformer_impl",
    "batch_invariant_mode": "rollout.true_on_policy",
    **dict.fromkeys(("recompute_method", "recompute_num_layers"), "train.recompute"),
    "moe_layer_recompute": "megatron.recompute_granularity=selective with recompute_modules=[moe]",
    **{name: f"optimizer.{name}" for name in (
        "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad",
        "muon_momentum", "muon_use_nesterov", "muon_num_ns_steps", "muon_coefficient_type",
        "muon_scale_mode", "muon_extra_scale_factor", "muon_split_qkv",
        "use_distributed_optimizer")},
    "optimizer": "optimizer.name",
    "muon_nesterov": "optimizer.muon_use_nesterov",
    "use_layer_wise_distributed_optimizer": "optimizer.use_distributed_optimizer",
    **dict.fromkeys(("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_detach_heads"),
        "train.mtp_loss_scaling_factor"),
    "main_grads_dtype": "megatron.grad_reduce_in_fp32=false, which gives bf16 gradients",
    **dict.fromkeys((
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
        "kv_channels", "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear",
        "add_qkv_bias", "gated_linear_unit", "glu_linear_offset", "activation_func",
        "activation_func_clamp_value", "num_moe_experts", "rotary_interleaved", "window_size",
        "window_attn_skip_freq", "normalization", "qk_layernorm", "qk_l2_norm",
        "attention_output_gate", "multi_latent_attention", "no_rope_freq", "softmax_scale",
        "softmax_type", "apply_residual_connection_post_layernorm",
        "experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
        "dsa_indexer_topk", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss",
        "dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32", "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu", "dsa_indexer_skip_topk_offset",
        "dsa_indexer_topk_freq", "dsa_kernel_backend", "mamba_training_ssm_states_dtype",
        "use_mup", "mup_attn_scale_power", "mup_base_head_dim", "mup_base_hidden_size",
        "mup_embedding_mult", "mup_output_mult", "mup_width_mult",
        "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
        "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
        "mtp_standalone", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer",
        "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq",
        "moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_limited_devices",
        "moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor", "moe_router_score_function",
        "moe_router_enable_expert_bias", "moe_latent_size", "moe_apply_probs_on_input",
        "mrope_section", "is_hybrid_model", "mamba_state_dim", "mamba_head_dim",
        "mamba_num_groups", "mamba_num_heads", "use_mamba_mem_eff_path",
        "heterogeneous_block_specs", "hetereogenous_dist_checkpoint",
        "use_fused_weighted_squared_relu", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
        "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base", "rotary_percent",
        "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim"), MODEL),
}  # fmt: skip
"""Maps a field that `megatron:` may not set to the name of what sets it instead: another recipe key
or the model's config.json."""

REFUSED: dict[str, tuple[str, ...]] = {
    "with dropout, the old log-probs, the recompute and the engine would be of different models": (
        "hidden_dropout", "attention_dropout", "moe_input_jitter_eps"),
    "the fused router of TransformerEngine chooses experts without regard to a replayed route": (
        "moe_router_fusion",),
    "it sends tokens to random experts, for benchmarks": (
        "moe_router_force_load_balancing", "moe_router_force_biased"),
    "experts would drop or pad tokens, even with a replayed route, which the engine does not do": (
        "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy",
        "moe_token_dropping", "moe_expert_rank_capacity_factor"),
    "it gives experts rows that no route names, so they would not get the replayed routes": (
        "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
    "a CUDA graph has one shape and no host reads, but packed micro-batches vary in length and each "
    "brings routes of its own": (
        "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope",
        "cuda_graph_modules", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph",
        "cuda_graph_warmup_steps", "use_te_rng_tracker", "optimizer_cuda_graph",
        "delay_offload_until_cuda_graph"),
    "mrl's losses are sums that carry their own normaliser, and Megatron must not divide by another": (
        "calculate_per_token_loss", "average_in_collective"),
    "lengths of packed micro-batches vary, and mrl sets it by the dispatcher": (
        "variable_seq_lengths",),
    "mrl sets it by the schedule: batched messages are silently wrong with virtual stages": (
        "overlap_p2p_comm", "batch_p2p_comm"),
    "it needs a torch that was built with ring_exchange": ("use_ring_exchange_p2p",),
    "Megatron's check raises on the rank that has the gradient while the others wait; mrl checks on "
    "all ranks together": ("check_for_nan_in_grad", "check_for_large_grads"),
    "a skipped update would go unnoticed; mrl stops the run where an update is not finite": (
        "grad_norm_skip_threshold",),
    "the learning rate is optimizer.lr for every parameter": (
        "decoupled_lr", "decoupled_min_lr"),
    "Muon orthogonalises whole matrices in the dtype of the weights, and Adam updates the rest": (
        "muon_fp32_matmul_prec", "muon_tp_mode", "muon_scalar_optimizer"),
    "mrl trains with Adam or Muon; its checkpoints, ledger and memory plan support no other state": (
        "sgd_momentum", "lion_beta1", "lion_beta2", "soap_shampoo_beta",
        "soap_precondition_frequency", "soap_use_kl_shampoo", "adaptive_muon_moment2_method",
        "adaptive_muon_beta2", "adaptive_muon_eps",
        "qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"),
    "model.dtype is float32 or bfloat16, which need no loss scale": (
        "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window",
        "hysteresis", "enable_autocast"),
    "messages between pipeline stages, checkpoints and the engine have model.dtype": (
        "fp32_residual_connection",),
    "weights are exported, offloaded and saved in model.dtype": (
        "fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag", "keep_fp8_transpose_cache"),
    "mrl pads packed rows for 8-bit products, not for 4-bit ones": (
        "fp4", "fp4_recipe", "fp4_quantizer_factory"),
    "a recipe does not name code for Megatron to import": ("fp8_quantizer_factory", "quant_recipe"),
    "mrl's layers are TransformerEngine's or its own": (
        "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
    "it gives all experts of a rank one parameter, which export and checkpoints do not support": (
        "moe_use_legacy_grouped_gemm", "moe_single_grouped_weight", "moe_single_grouped_bias"),
    "it lays weights out in a way that export and checkpoints do not support": (
        "mla_down_proj_fusion", "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size", "use_grouped_gemm_for_dense_mlp",
        "use_grouped_gemm_for_shared_expert", "use_transformer_engine_op_fuser"),
    "it shards weights over more ranks, and mrl exports, offloads and saves them whole": (
        "gtp_weight_remat_size", "expert_gtp_weight_remat_size",
        "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
    "FSDP shards parameters, which mrl exports, offloads and saves whole": (
        "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy",
        "suggested_communication_unit_size", "preserve_fp32_weights", "fsdp_double_buffer",
        "outer_dp_sharding_strategy", "fsdp_manual_registration", "gradient_reduce_div_fusion",
        "init_model_with_meta_device", "fsdp_db_use_persist_buf_on_alloc_fail",
        "fsdp_all_gather_in_start_param_sync", "megatron_fsdp_main_params_dtype",
        "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype",
        "megatron_fsdp_use_decoupled_grad", "megatron_fsdp_cuda_graph_mode",
        "megatron_fsdp_enable_fine_grained_param_gather", "megatron_fsdp_max_pool_double_buffer"),
    "buffers that are registered with NCCL cannot be freed while the engine generates": (
        "nccl_ub", "disable_symmetric_registration"),
    "mrl makes one group of data-parallel ranks": ("num_distributed_optimizer_instances",),
    "its first gather starts inside the optimizer step, for the interleaved schedule of pre-training": (
        "overlap_param_gather_with_optimizer_step",),
    "only the interleaved schedule starts those gathers, in passes without an update as well": (
        "align_param_gather",),
    "TransformerEngine's userbuffers have one size, and packed micro-batches vary": (
        "tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag",
        "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag",
        "tp_comm_split_rs", "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv",
        "tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend"),
    "its schedule alternates between two micro-batches, and a router holds the route of only one": (
        "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
        "ep_overlap_early_attn_memory_release", "overlap_dispatch_backward_with_experts_wgrad"),
    "which micro-batches are recomputed would vary, and replay keeps a route for each recompute": (
        "num_microbatches_with_partial_activation_checkpoints",),
    "it needs the output layer and the loss of Megatron's pre-training": (
        "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    "Megatron's own loss is not used: log-probs come from mrl's kernel": (
        "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    "mrl's attention layers have an fp32 softmax over packed sequences": (
        "attention_softmax_in_fp32", "apply_query_key_layer_scaling", "masked_softmax_fusion"),
    "mrl shares sequences out over context-parallel ranks itself": (
        "hybrid_context_parallel", "hierarchical_context_parallel_sizes",
        "max_seqlen_per_dp_cp_rank"),
    "it is for the LayerNorm of apex, and these models have RMSNorm": (
        "persist_layer_norm", "memory_efficient_layer_norm"),
    "sequence parallelism is on wherever there is tensor parallelism, which excludes it": (
        "distribute_saved_activations",),
    "weights are loaded from the model, never drawn": (
        "perform_initialization", "use_cpu_initialization", "init_method_std",
        "embedding_init_method_std"),
    "it is a function, and a recipe holds values": (
        "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func",
        "param_sync_func", "init_method", "output_layer_init_method", "embedding_init_method",
        "moe_grad_scale_func", "mtp_grad_scale_func",
        "experimental_attention_variant_loss_scale_func"),
    "TransformerEngine would move weights that mrl moves itself": ("cpu_offloading_weights",),
    "it is internal to Megatron": ("_cpu_offloading_context",),
    "the engine generates, not Megatron": (
        "flash_decode", "inference_rng_tracker", "inference_sampling_seed",
        "use_inference_optimized_layers", "inference_fuse_tp_communication", "symmetric_ar_type",
        "mlp_chunks_for_prefill", "cache_mla_latents", "inference_cuda_graph_scope",
        "nccl_all_reduce_for_prefill", "inference_disable_triton_nvls_kernels",
        "inference_grouped_gemm_backend", "inference_moe_disable_fused_quant_kernels",
        "inference_moe_token_dispatcher_type", "moe_pad_experts_for_cuda_graph_inference"),
    "megatron-core 0.19 is the first to have it, and no one has tried it with mrl": (
        "activation_offload_fraction", "cpu_offloading_retain_pinned_cpu_buffers",
        "delta_offload_bytes_across_pp_ranks", "fine_grained_offloading_max_inflight_offloads",
        "flash_attention_version", "fp8_output_proj", "fused_residual_rmsnorm",
        "high_priority_a2a_comm_stream", "mlp_chunks_for_training", "moe_flex_dispatcher_num_sms",
        "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute",
        "moe_hybridep_num_sms_preprocessing", "moe_hybridep_pad_uneven_dispatch_inputs",
        "moe_ncclep_static_shape", "moe_ncclep_zero_copy", "moe_paged_stash",
        "moe_paged_stash_buffer_size_factor_cpu", "moe_paged_stash_buffer_size_factor_cuda",
        "moe_paged_stash_page_size", "moe_permute_fusion_into_hybridep", "num_buckets",
        "param_name_patterns_for_fp32_local_accumulation"),
    "nothing in mrl reads it": (
        "moe_per_layer_logging", "log_num_zeros_in_grad", "barrier_with_L1_time",
        "config_logger_dir", "test_mode", "async_tensor_model_parallel_allreduce",
        "pipeline_model_parallel_comm_backend", "use_torch_optimizer_for_cpu_offload",
        "pin_cpu_params", "fp8_interval"),
}  # fmt: skip
"""Maps a reason to the fields that no recipe may set for that reason."""

NEEDS_TRANSFORMER_ENGINE = (
    "apply_rope_fusion", "fused_single_qkv_rope", "moe_permute_fusion", "use_te_activation_func",
    "attention_backend", "cp_comm_type", "deterministic_mode", "disable_parameter_transpose_cache",
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo",
    "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "cpu_offloading",
    "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_double_buffering",
)  # fmt: skip
"""Allowed fields that only layers of TransformerEngine have."""
NEEDS_CUDA = (
    "gradient_accumulation_fusion", "fine_grained_activation_offloading", "offload_modules",
    "min_offloaded_tensor_size", "moe_flex_dispatcher_backend", "moe_deepep_num_sms",
    "moe_hybridep_num_sms", "disable_bf16_reduced_precision_matmul", "batch_p2p_sync",
)  # fmt: skip
"""Allowed fields that are impossible, or have no effect, on a machine without CUDA."""
ANYWHERE = (
    # of the model
    "bias_activation_fusion", "bias_dropout_fusion", "activation_func_fp8_input_store",
    "moe_router_dtype", "moe_shared_expert_overlap", "recompute_granularity", "recompute_modules",
    "clone_scatter_output_in_embedding", "deallocate_pipeline_outputs",
    "overlap_p2p_comm_warmup_flush", "microbatch_group_size_per_vp_stage",
    # of the reduction of gradients
    "grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "bucket_size",
    "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation",
    # of the optimizer
    "apply_wd_to_qk_layernorm", "decoupled_weight_decay", "use_precision_aware_optimizer",
    "store_param_remainders", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
)  # fmt: skip
NEVER_ON = frozenset(
    ("moe_router_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion",
     "gradient_reduce_div_fusion"))  # fmt: skip
"""Fusions in REFUSED that are always off in mrl. A recipe may set them to false."""
ALLOWED = frozenset((*NEEDS_TRANSFORMER_ENGINE, *NEEDS_CUDA, *ANYWHERE))
REASONS = {name: reason for reason, names in REFUSED.items() for name in names}
