"""SGLang plugin: POST /weights_checker {"action": "mrl_digest"} answers with digests of the weights.

Loaded by SGLang in each of its processes, on CPUs and on GPUs. Every rank sums up its own parameters,
and rank 0 answers for all of them: versions before 0.5.20 return what rank 0 says only. Read by
mrl/rollout/sglang/held.py. Beside that a bucket counts as loaded when the device has read it.
"""

ACTION = "mrl_digest"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.utils.weight_checker.WeightChecker.handle", handle, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.update_weights_from_tensor",
        synchronised,
        HookType.AROUND,
    )


def handle(original, checker, action="checksum", *args, **options):
    """Handle what WeightChecker.handle does, and one action more."""
    if action != ACTION:
        return original(checker, action, *args, **options)
    from sglang.srt.distributed import get_tp_group

    # 0.5.12 has the runner instead of the function.
    model = checker._get_model() if hasattr(checker, "_get_model") else checker._model_runner.model
    ranks = of_all_ranks(model, get_tp_group().all_gather_object)
    answer = {
        f"{rank} {name}": text for rank, own in enumerate(ranks) for name, text in own.items()
    }
    role = {"role": options["role"]} if "role" in options else {}  # since 0.5.23
    return {
        "checksums": answer if get_tp_group().rank_in_group == 0 else {},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(**role).model_dump(),
    }


def of_all_ranks(model, all_gather):
    """What digests() says on each rank. Raises RuntimeError on all of them where one fails.

    A rank that raised before the collective would leave the others waiting in it.
    """
    own, failure = {}, ""
    try:
        own = digests(model)
    except Exception as error:  # it must reach the other ranks, whatever it is
        failure = f"{type(error).__name__}: {error}"
    ranks = all_gather((own, failure))
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(ranks) if text]:
        raise RuntimeError("; ".join(failed))
    return [own for own, _ in ranks]


def synchronised(original, worker, *args, **options):
    """TpModelWorker.update_weights_from_tensor that returns when the device has read the bucket.

    Its copies are queued on the device, and the answer follows a barrier of the CPUs alone
    (`update_weights_from_tensor` of managers/scheduler_components/weight_updater.py in 0.5.20, of
    scheduler_update_weights_mixin.py in 0.5.12); the trainer writes over the bucket after the answer.
    """
    import torch

    result = original(worker, *args, **options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def digests(model):
    """Return `dtype numel piece digest[,digest...] [expert,...]` of each parameter of this rank.

    Ranks that say the same piece hold the same values, other pieces are other parts of the parameter;
    `?` is of a module that does not say what it holds. Fused experts [E, ...] have one digest an expert
    and the numbers of these experts in the whole model.
    """
    from mrl.kernels.digest import MODULUS, weight_sums

    modules = dict(model.named_modules())
    parts = [
        part
        for name, parameter in model.named_parameters()
        for part in parts_of(modules[name.rpartition(".")[0]], name, parameter)
    ]
    # One copy from the device for all parameters.
    sums = weight_sums([(weights, len(experts) or 1) for _, weights, _, experts in parts]).tolist()
    lines, start = {}, 0
    for name, weights, piece, experts in parts:
        end = start + (len(experts) or 1)
        texts = ",".join(f"{number % MODULUS:x}" for number in sums[start:end])
        dtype, start = str(weights.dtype).removeprefix("torch."), end
        line = f"{dtype} {weights.numel()} {piece} {texts}"
        lines[name] = f"{line} {','.join(map(str, experts))}" if experts else line
    return lines


def parts_of(module, name, parameter):
    """[(name, weights, piece, experts)] of a parameter of `module`: what can be told apart in it."""
    if ".experts." in name and parameter.dim() == 3:
        piece = module.moe_tp_rank if hasattr(module, "moe_tp_rank") else "?"
        return [(name, parameter, piece, experts_of(module, parameter.shape[0]))]
    if hasattr(module, "shard_indices"):  # VocabParallelEmbedding, ParallelLMHead
        return [(name, parameter, module.shard_indices.org_vocab_start_index, [])]
    if not hasattr(module, "tp_rank"):  # norms, routers: whole on every rank, as a rule
        return [(name, parameter, "?", [])]
    if hasattr(module, "input_is_parallel") and name.endswith(".bias"):  # RowParallelLinear
        return [(name, parameter, 0, [])]
    replicas = getattr(module, "num_kv_head_replicas", 1)
    kv_rank = getattr(module, "kv_tp_rank", module.tp_rank)  # since 0.5.20
    if replicas == 1 and kv_rank == module.tp_rank:
        return [(name, parameter, module.tp_rank, [])]
    # Fewer key and value heads than ranks: each of them is on several.
    queries = module.num_heads * module.head_size
    return [
        (name + "#q", parameter[:queries], module.tp_rank, []),
        (name + "#kv", parameter[queries:], kv_rank // replicas, []),
    ]


def experts_of(module, num_held):
    """The number in the whole model of each expert that a fused layer holds.

    As `FusedMoE._map_global_expert_id_to_local_expert_id` has it: expert-parallel ranks hold blocks of
    the routed experts, and fused shared experts after them, numbered after the last routed one.
    """
    if not hasattr(module, "moe_ep_rank"):
        return list(range(num_held))
    num_routed = module._num_local_routed
    check_placement(module)
    first = getattr(module, "_expert_storage_rank", module.moe_ep_rank) * num_routed
    shared = range(module._num_global_routed, module._num_global_routed + num_held - num_routed)
    return [*range(first, first + num_routed), *shared]


def check_placement(module):
    """Raises RuntimeError where experts are not where they are in the checkpoint."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    placement = get_global_expert_location_metadata()
    if placement is None:
        return
    experts = placement.physical_to_logical_map_cpu[module.layer_id].tolist()
    if experts != list(range(len(experts))):
        raise RuntimeError(
            f"layer {module.layer_id} holds the experts {experts[:4]}..., and digests are for experts "
            "in the order of the checkpoint; leave out SGLang's enable_eplb, init_expert_location and "
            "ep_num_redundant_experts"
        )
