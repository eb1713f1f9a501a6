"""SGLang plugin: POST /weights_checker {"action": "mrl_digest"} answers with digests of the weights.

SGLang loads this plugin in each of its processes, on CPUs and on GPUs. Every rank computes the digests
of its own parameters, and rank 0 answers for all ranks, because SGLang before 0.5.20 returns only the
answer of rank 0. mrl/engines/sglang/digests.py reads the answer. The plugin also makes SGLang report a
bucket as loaded only when the device has read it.
"""

from mrl.engines.sglang.compat import hook, parallelism_info, take

ACTION = "mrl_digest"
QUANTIZED = "quantized:"


def register():
    hook("WeightChecker.handle", handle, "AROUND")
    hook("load_bucket", synchronised, "AROUND")


def handle(original, checker, action="checksum", *args, **options):
    """Wrap WeightChecker.handle so that the action `mrl_digest` is answered, too."""
    if action != ACTION:
        return original(checker, action, *args, **options)
    # 0.5.12 has the runner instead of the function.
    model = checker._get_model() if hasattr(checker, "_get_model") else checker._model_runner.model
    group = take("get_tp_group")()
    ranks = of_all_ranks(model, group.all_gather_object)
    answer = {
        f"{rank} {name}": text for rank, own in enumerate(ranks) for name, text in own.items()
    }
    return {
        "checksums": answer if group.rank_in_group == 0 else {},
        "per_gpu_checksum": "",
        "parallelism_info": parallelism_info(checker, options),
    }


def of_all_ranks(model, all_gather):
    """Return the result of digests() for each rank. Raises RuntimeError on all ranks if a rank fails.

    If a rank raised before the collective, the other ranks would wait in the collective forever.
    """
    own, failure = {}, ""
    try:
        own = digests(model)
    except Exception as error:  # whatever it is, the other ranks must learn of it
        failure = f"{type(error).__name__}: {error}"
    ranks = all_gather((own, failure))
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(ranks) if text]:
        raise RuntimeError("; ".join(failed))
    return [own for own, _ in ranks]


def synchronised(original, worker, *args, **options):
    """Run SGLang's function `original`, which loads a bucket, and return when the device has read
    the bucket.

    SGLang queues its copies on the device, and answers after a barrier of the CPUs alone
    (`update_weights_from_tensor` of managers/scheduler_components/weight_updater.py in 0.5.20, of
    scheduler_update_weights_mixin.py in 0.5.12). The trainer overwrites the bucket after the answer.
    """
    import torch

    result = original(worker, *args, **options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def digests(model):
    """Return the text `dtype piece digest[,digest...] [expert,...]` of each parameter of this rank,
    by the parameter's name.

    The piece names the part of the parameter that this rank holds: ranks with the same piece hold
    the same values. It is `?` for a module that does not know its part. A parameter of fused
    experts [E, ...] has one digest for each expert, and the experts' indices in the whole model.
    Each module that computes with quantised weights adds one more key, QUANTIZED followed by the
    module's name, with an empty text.
    """
    from mrl.kernels.digest import MODULUS, weight_sums
    from mrl.quantization import DTYPES

    modules = dict(model.named_modules())
    quantized = [
        name
        for name, module in modules.items()
        if getattr(module, "mrl_quantized", False)  # set by mrl_cpu_quantized
        or any(each.dtype in DTYPES for each in module.parameters(recurse=False))
    ]
    check_cache_scales(model)
    parts = [
        part
        for name, parameter in model.named_parameters()
        if not is_cache_scale(parameter)
        for part in parts_of(modules[name.rpartition(".")[0]], name, parameter)
    ]
    # One copy from the device for all parameters.
    sums = weight_sums([(weights, len(experts) or 1) for _, weights, _, experts in parts]).tolist()
    lines, start = {}, 0
    for name, weights, piece, experts in parts:
        end = start + (len(experts) or 1)
        texts = ",".join(f"{number % MODULUS:x}" for number in sums[start:end])
        dtype, start = str(weights.dtype).removeprefix("torch."), end
        line = f"{dtype} {piece} {texts}"
        lines[name] = f"{line} {','.join(map(str, experts))}" if experts else line
    return lines | {QUANTIZED + name: "" for name in quantized}


def is_cache_scale(parameter):
    """Return whether a parameter is `k_scale` or `v_scale` of an attention layer.

    A model with quantised weights has them for its KV cache (BaseKVCacheMethod of
    layers/quantization/kv_cache.py), and the trainer has nothing of that kind. SGLang's own
    WeightChecker leaves them out by this attribute too.
    """
    return getattr(parameter, "_skip_weight_check", False)


def check_cache_scales(model):
    """Raise RuntimeError unless all scales of the KV cache are 1, SGLang's default."""
    scales = {n: p for n, p in model.named_parameters() if is_cache_scale(p)}
    values = [p.detach().reshape(-1) for p in scales.values()]
    if not values:
        return
    import torch

    wrong = [n for n, value in zip(scales, torch.cat(values).tolist(), strict=True) if value != 1.0]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} of {len(scales)} scales of the KV cache are not 1, for example {wrong[0]}; "
            "expected SGLang to set them to 1, because the trainer sends none"
        )


def parts_of(module, name, parameter):
    """Return [(name, weights, piece, experts)] for each part of a parameter of `module` that gets a
    digest of its own. `piece` says which part of the parameter this rank holds (see `digests`).
    `experts` has the experts' indices in the whole model; it is empty except for fused experts."""
    # Weights are [E, ...], and biases, which gpt-oss has, are [E, outputs].
    if ".experts." in name and (parameter.dim() == 3 or name.endswith("_weight_bias")):
        piece = module.moe_tp_rank if hasattr(module, "moe_tp_rank") else "?"
        return [(name, parameter, piece, experts_of(module, parameter.shape[0]))]
    if hasattr(module, "shard_indices"):  # VocabParallelEmbedding, ParallelLMHead
        return [(name, parameter, module.shard_indices.org_vocab_start_index, [])]
    if name.endswith(".sinks"):  # of gpt-oss: they are split like the heads
        projection = getattr(module.qkv_proj, "base_layer", module.qkv_proj)
        return [(name, parameter, rank_in(projection, "tp_rank", "tp_group"), [])]
    if (rank := rank_in(module, "tp_rank", "tp_group")) is None:  # norms and routers, usually whole
        return [(name, parameter, "?", [])]
    if hasattr(module, "input_is_parallel") and name.endswith(".bias"):  # RowParallelLinear
        return [(name, parameter, 0, [])]
    replicas = getattr(module, "num_kv_head_replicas", 1)
    kv_rank = rank_in(module, "kv_tp_rank", "kv_tp_group")
    kv_rank = rank if kv_rank is None else kv_rank
    if replicas == 1 and kv_rank == rank:
        return [(name, parameter, rank, [])]
    # There are fewer key and value heads than ranks, so each head is on several ranks.
    queries = module.num_heads * module.head_size
    if len(parameter) < len(module.weight):  # scales of blocks of rows
        queries = queries * len(parameter) // len(module.weight)
    return [
        (name + "#q", parameter[:queries], rank, []),
        (name + "#kv", parameter[queries:], kv_rank // replicas, []),
    ]


def rank_in(module, number, group):
    """Return this rank's index in the group of ranks that split a layer. Before SGLang 0.5.22, the
    layer's attribute with the name `number` has the index. Since then, its attribute with the name
    `group` has the group. Return None if the layer has neither attribute."""
    if hasattr(module, number):
        return getattr(module, number)
    if not hasattr(module, group):
        return None
    return take("get_group_rank_size")(getattr(module, group))[0]


def experts_of(module, num_held):
    """Return the indices, in the whole model, of the experts that a fused layer holds.

    As in `FusedMoE._map_global_expert_id_to_local_expert_id`, each expert-parallel rank holds a block
    of routed experts, then the fused shared experts, whose indices follow the last routed one.
    """
    if not hasattr(module, "moe_ep_rank"):
        return list(range(num_held))
    num_routed = module._num_local_routed
    check_placement(module)
    first = getattr(module, "_expert_storage_rank", module.moe_ep_rank) * num_routed
    shared = range(module._num_global_routed, module._num_global_routed + num_held - num_routed)
    return [*range(first, first + num_routed), *shared]


def check_placement(module):
    """Raise RuntimeError if the experts of a layer are not in the checkpoint's order."""
    placement = take("get_global_expert_location_metadata")()
    if placement is None:
        return
    experts = placement.physical_to_logical_map_cpu[module.layer_id].tolist()
    if experts != list(range(len(experts))):
        raise RuntimeError(
            f"layer {module.layer_id} holds the experts {experts[:4]}..., and digests are for experts "
            "in the order of the checkpoint; leave out SGLang's enable_eplb, init_expert_location and "
            "ep_num_redundant_experts"
        )
