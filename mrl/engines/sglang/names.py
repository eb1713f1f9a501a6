"""Every internal name of SGLang that mrl uses (hook targets, imports and attributes), by release.

SGLang may change these names in any release. The plug-ins look them up through compat.py, so a release
that moves a name needs one more line here.
"""

from __future__ import annotations

from functools import partial

from mrl.system.releases import ADAPTERS_SINCE, SUPPORTED, Name, since

always = partial(since, SUPPORTED["sglang"][0])
"""Makes a `Name` whose path is the same in all supported releases."""
_adapters = partial(since, ADAPTERS_SINCE)
_SRT = "sglang.srt"
_LAYERS, _LORA, _MANAGERS = f"{_SRT}.layers", f"{_SRT}.lora", f"{_SRT}.managers"
_ADDER = f"{_MANAGERS}.schedule_policy.PrefillAdder"
_CAPTURER = f"{_SRT}.state_capturer.routed_experts.RoutedExpertsCapturer"
_NATIVE = f"{_LAYERS}.attention.torch_native_backend.TorchNativeAttnBackend"
_LORA_MANAGER = f"{_LORA}.lora_manager.LoRAManager"
_LORA_EXPERTS = f"{_LORA}.layers.FusedMoEWithLoRA"
_BATCH_INFO = f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo"
_CHECKER = f"{_SRT}.utils.weight_checker.WeightChecker"
_FUSED_MOE = f"{_LAYERS}.moe.fused_moe_triton.layer.FusedMoE"
_GPT_OSS = f"{_SRT}.models.gpt_oss"
_HOOKS = f"{_SRT}.plugins.hook_registry"
_LINEAR = f"{_LAYERS}.linear"
_REQ = f"{_MANAGERS}.schedule_batch.Req"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_TOKENIZER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"
_TOPK = f"{_LAYERS}.moe.topk"
_SAMPLING = ("self", "logits_output", "sampling_info", "return_logprob")
_CACHE = ("query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens")
_ATTENTION = ("encoder_lens", "scaling", "causal", "sliding_window_size")

NAMES: dict[str, Name] = {
    # The server process (child.py) and every plug-in.
    "HookRegistry.register": always(
        f"{_HOOKS}.HookRegistry.register", "target", "hook", "hook_type"
    ),
    "HookType": always(f"{_HOOKS}.HookType", attributes=("BEFORE", "AFTER", "AROUND", "REPLACE")),
    "load_plugins": always(f"{_SRT}.plugins.load_plugins"),
    "run_server": always("sglang.launch_server.run_server", "server_args"),
    "ServerArgs": always(f"{_SRT}.server_args.ServerArgs"),
    "kill_process_tree": always(f"{_SRT}.utils.kill_process_tree", "parent_pid", "include_parent"),
    # plugins/server
    "decide_request_auth": always(f"{_SRT}.utils.auth.decide_request_auth", "method", "path"),
    "SafeUnpickler": always(f"{_SRT}.utils.common.SafeUnpickler"),
    "allowed_globals": Name(
        {
            "0.5.12": f"{_SRT}.utils.common.SafeUnpickler.ALLOWED_MODULE_PREFIXES",
            "0.5.21": f"{_SRT}.utils.common.SafeUnpickler.ALLOWED_GLOBALS",
        }
    ),
    "WeightChecker": always(_CHECKER, attributes=("_parallelism_info",)),
    "WeightChecker.handle": always(f"{_CHECKER}.handle", "self", "action"),
    "WeightChecker.model": Name(
        {
            "0.5.12": f"{_CHECKER}._model_runner",
            "0.5.20": f"{_CHECKER}._get_model",
        }
    ),
    "load_bucket": Name(
        {
            "0.5.12": f"{_MANAGERS}.tp_worker.TpModelWorker.update_weights_from_tensor",
            "0.5.20": f"{_SRT}.model_executor.model_runner_components.weight_updater."
            "WeightUpdater.update_weights_from_tensor",
        },
        ("self",),
    ),
    "get_tp_group": always(f"{_SRT}.distributed.get_tp_group"),
    "get_global_expert_location_metadata": always(
        f"{_SRT}.eplb.expert_location.get_global_expert_location_metadata"
    ),
    "FusedMoE": always(
        _FUSED_MOE,
        attributes=("moe_tp_rank", "moe_ep_rank", "_num_local_routed", "_num_global_routed"),
    ),
    "FusedMoE.storage_rank": since("0.5.20", f"{_FUSED_MOE}._expert_storage_rank"),
    "linear_rank": Name(
        {
            "0.5.12": f"{_LINEAR}.ColumnParallelLinear.tp_rank",
            "0.5.22": f"{_LINEAR}.ColumnParallelLinear.tp_group",
        }
    ),
    "linear_kv_rank": Name(
        {
            "0.5.20": f"{_LINEAR}.QKVParallelLinear.kv_tp_rank",
            "0.5.22": f"{_LINEAR}.QKVParallelLinear.kv_tp_group",
        }
    ),
    "get_group_rank_size": since("0.5.22", f"{_SRT}.distributed.utils.get_group_rank_size", "group"),
    "QKVParallelLinear": always(
        f"{_LINEAR}.QKVParallelLinear",
        attributes=("num_kv_head_replicas", "num_heads", "head_size"),
    ),
    "WeightVersionEvent": since("0.5.20", f"{_SRT}.utils.weight_versions.WeightVersionEvent"),
    "Req": always(
        _REQ,
        attributes=(
            "extra_key", "lora_id", "output_ids", "finished", "origin_input_ids",
            "return_logprob", "logprob_start_len",
        ),
    ),
    "Req.prefix": Name({"0.5.12": f"{_REQ}.prefix_indices", "0.5.22": f"{_REQ}.prefix_len"}),
    "Req.weight_version_events": since("0.5.20", f"{_REQ}.weight_version_events"),
    "Req.init_next_round_input": always(f"{_REQ}.init_next_round_input", "self", "tree_cache"),
    "Scheduler": always(_SCHEDULER, attributes=("enable_overlap", "result_queue", "chunked_req")),
    "Scheduler.pause_generation": always(f"{_SCHEDULER}.pause_generation"),
    "Scheduler.record_weight_version_change": since(
        "0.5.20", f"{_SCHEDULER}.record_weight_version_change"
    ),
    "get_serving": since("0.5.20", f"{_SRT}.runtime_context.get_serving"),
    "PrefillAdder": always(
        _ADDER, attributes=("tree_cache", "can_run_list", "is_hybrid_ssm_cache", "page_size")
    ),
    "PrefillAdder.add_one_req": always(f"{_ADDER}.add_one_req", "self", "req"),
    "AddReqResult": always(
        f"{_MANAGERS}.schedule_policy.AddReqResult", attributes=("CONTINUE",)
    ),
    "SenderWrapper.send_output": Name(
        {
            "0.5.12": f"{_MANAGERS}.scheduler.SenderWrapper.send_output",
            "0.5.20": f"{_MANAGERS}.scheduler_components.output_sender.SenderWrapper.send_output",
        },
        ("self", "output"),
    ),
    "SenderWrapper": Name(
        {
            "0.5.12": f"{_MANAGERS}.scheduler.SenderWrapper",
            "0.5.20": f"{_MANAGERS}.scheduler_components.output_sender.SenderWrapper",
        },
        attributes=("socket",),
    ),
    # plugins/routing_weights
    "RoutedExpertsCapturer": since(
        "0.5.20",
        _CAPTURER,
        attributes=("num_fused_shared_experts", "num_layers", "topk_size", "device_cache"),
    ),
    "RoutedExpertsCapturer.create": since("0.5.20", f"{_CAPTURER}.create", "num_tokens", "device"),
    "RoutedExpertsCapturer.capture": since(
        "0.5.20", f"{_CAPTURER}.capture", "self", "layer_id", "topk_indices"
    ),
    "_post_process_topk_ids": always(f"{_TOPK}._post_process_topk_ids", "topk_ids", "topk_weights"),
    "BaseDeviceCache": since(
        "0.5.20",
        f"{_SRT}.state_capturer.base.BaseDeviceCache",
        "max_batch_size", "num_layers", "topk_size", "device", "name",
    ),
    "BaseHostCache": since(
        "0.5.20",
        f"{_SRT}.state_capturer.base.BaseHostCache",
        "num_tokens", "num_layers", "topk_size", "name", "device",
        attributes=("destroy",),
    ),
    # plugins/cpu
    "ALLOC_MEMORY_FUNCS": since("0.5.20", f"{_SRT}.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS"),
    "multinomial_with_seed": always(
        f"{_LAYERS}.sampler.multinomial_with_seed", "logprobs", "seed", "positions"
    ),
    "sampling_from_probs_torch": since(
        "0.5.20", f"{_LAYERS}.sampler.sampling_from_probs_torch",
        "probs", "sampling_seed", "positions",
    ),
    "Sampler._sample_from_probs": always(
        f"{_LAYERS}.sampler.Sampler._sample_from_probs",
        "self", "probs", "sampling_info", "positions", "simple_sampling_case",
    ),
    "SamplingBatchInfo": always(
        _BATCH_INFO, attributes=("sampling_seed", "top_ks", "top_ps", "min_ps", "temperatures"),
    ),
    "SamplingBatchInfo.from_schedule_batch": always(
        f"{_BATCH_INFO}.from_schedule_batch", "cls", "batch", "vocab_size",
    ),
    "moe_forward_native": always(
        f"{_LAYERS}.moe.fused_moe_native.moe_forward_native",
        "layer", "x", "topk_output", "moe_runner_config",
    ),
    "find_nccl_library": always(
        f"{_SRT}.distributed.device_communicators.pynccl_wrapper.find_nccl_library"
    ),
    "_set_envs_and_config": always(
        f"{_SRT}.entrypoints.engine._set_envs_and_config", "server_args"
    ),
    "TorchNativeAttnBackend": always(_NATIVE),
    "CpuDeviceMixin.empty_cache": since(
        "0.5.20", f"{_SRT}.platforms.cpu.CpuDeviceMixin.empty_cache", "self"
    ),
    "fused_gate_sigmoid_mul_add": since(
        "0.5.20", "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        "hidden_states", "gate_weight", "shared_output", "final_hidden_states",
    ),
    # plugins/cpu, and plugins/on_policy in its place
    "_run_sdpa_forward_extend": since(
        "0.5.20",
        f"{_NATIVE}._run_sdpa_forward_extend",
        "self", *_CACHE, "extend_prefix_lens", "extend_seq_lens", *_ATTENTION,
    ),
    "_run_sdpa_forward_decode": since(
        "0.5.20", f"{_NATIVE}._run_sdpa_forward_decode", "self", *_CACHE, *_ATTENTION
    ),
    "apply_qk_norm": since(
        "0.5.20", f"{_SRT}.models.utils.apply_qk_norm", "q", "k", "q_norm", "k_norm", "head_dim"
    ),
    "RotaryEmbedding.forward_native": since(
        "0.5.20",
        f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding.forward_native",
        "self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg",
    ),
    # plugins/on_policy
    "FlattenedTensorBucket.reconstruct_tensors": always(
        f"{_SRT}.weight_sync.tensor_bucket.FlattenedTensorBucket.reconstruct_tensors", "self"
    ),
    "UnquantizedLinearMethod.apply": always(
        f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply",
        "self", "layer", "x", "bias",
    ),
    "RMSNorm.forward_native": since(
        "0.5.20",
        f"{_LAYERS}.layernorm.RMSNorm.forward_native",
        "self", "x", "residual", "post_residual_addition", "quant_linear",
    ),
    "fused_topk_native": always(f"{_TOPK}.fused_topk_native"),
    "fused_topk_torch_native": always(
        f"{_TOPK}.fused_topk_torch_native",
        "hidden_states", "gating_output", "topk", "renormalize", "correction_bias", "scoring_func",
    ),
    "_compute_lm_head": always(
        f"{_LAYERS}.logits_processor.LogitsProcessor._compute_lm_head",
        "self", "hidden_states", "lm_head", "embedding_bias",
    ),
    "Sampler.forward": always(f"{_LAYERS}.sampler.Sampler.forward", *_SAMPLING),
    # plugins/gpt_oss
    "GptOssForCausalLM.load_weights": since(
        "0.5.23", f"{_GPT_OSS}.GptOssForCausalLM.load_weights", "self", "weights"
    ),
    "GptOssAttention.__init__": since("0.5.23", f"{_GPT_OSS}.GptOssAttention.__init__", "self"),
    "ATTENTION_BACKENDS": since(
        "0.5.23", f"{_LAYERS}.attention.attention_registry.ATTENTION_BACKENDS"
    ),
    "KVWriteLoc": since("0.5.23", f"{_SRT}.mem_cache.memory_pool.KVWriteLoc"),
    # plugins/adapter and plugins/cpu_adapter
    "LoRAManager": _adapters(
        _LORA_MANAGER,
        attributes=("fetch_new_loras", "lora_refs", "loras", "lora_modules", "memory_pool"),
    ),
    "_load_lora_adapter_from_tensors": _adapters(
        f"{_LORA_MANAGER}._load_lora_adapter_from_tensors", "self", "lora_ref", "tensors"
    ),
    "_unload_lora_adapter": _adapters(f"{_LORA_MANAGER}._unload_lora_adapter", "self", "lora_ref"),
    "LoRAManager.init_state": _adapters(f"{_LORA_MANAGER}.init_state", "self"),
    "LoRAManager.prepare_lora_batch": _adapters(f"{_LORA_MANAGER}.prepare_lora_batch", "self"),
    "LoRAMemoryPool": _adapters(
        f"{_LORA}.mem_pool.LoRAMemoryPool",
        attributes=(
            "A_buffer", "B_buffer", "get_buffer_id", "target_modules", "max_lora_rank",
            "_iter_local_expert_weights",
        ),
    ),
    "ModelRunner": _adapters(_RUNNER, attributes=("_weight_checker", "lora_manager")),
    "ModelRunner.check_weights": _adapters(f"{_RUNNER}.check_weights", "self", "action"),
    "TokenizerManager": _adapters(
        _TOKENIZER, attributes=("rid_to_state", "lora_registry", "enable_lora"),
    ),
    "TokenizerManager._handle_abort_req": Name(  # since 0.5.22 it releases the adapter itself
        {ADAPTERS_SINCE: f"{_TOKENIZER}._handle_abort_req", "0.5.22": ""}, ("self", "recv_obj")
    ),
    "FusedMoEWithLoRA": _adapters(_LORA_EXPERTS, attributes=("tp_size", "base_layer")),
    "FusedMoEWithLoRA._forward_with_lora": _adapters(
        f"{_LORA_EXPERTS}._forward_with_lora", "self", "hidden_states", "topk_output", "lora_info"
    ),
    "slice_moe_lora_a_weights": _adapters(
        f"{_LORA_EXPERTS}.slice_moe_lora_a_weights", "self", "A", "tp_rank", "target_module"
    ),
    "slice_moe_lora_b_weights": _adapters(
        f"{_LORA_EXPERTS}.slice_moe_lora_b_weights", "self", "B", "tp_rank", "target_module"
    ),
    "_compute_moe_lora_info": _adapters(
        f"{_LORA}.backend.base_backend._compute_moe_lora_info",
        "num_tokens", "seg_indptr", "lora_ranks", "weight_indices", "adapter_enabled",
        "token_lora_mapping", "max_len",
    ),
    "sgemm_lora_a_fwd": _adapters(
        f"{_LORA}.backend.torch_backend.sgemm_lora_a_fwd",
        "inputs", "weights", "batch_info", "num_slices",
    ),
    "sgemm_lora_b_fwd": _adapters(
        f"{_LORA}.backend.torch_backend.sgemm_lora_b_fwd",
        "inputs", "weights", "batch_info", "slice_offsets", "base_output",
    ),
    "get_stacked_multiply": _adapters(
        f"{_LORA}.utils.get_stacked_multiply", "module_name", "base_model"
    ),
    "get_target_module_name": _adapters(
        f"{_LORA}.utils.get_target_module_name", "full_module_name", "target_modules"
    ),
    "StandardCombineInput": always(f"{_LAYERS}.moe.token_dispatcher.StandardCombineInput"),
}  # fmt: skip
