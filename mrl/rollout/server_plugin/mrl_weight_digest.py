"""SGLang plugin: POST /weights_checker {"action": "mrl_digest"} answers with digests of the weights.

Loaded by SGLang in each of its processes, on CPUs and on GPUs; nothing else of it is touched. Every
rank sums up its own parameters, and rank 0 answers for all of them: versions before 0.5.20 return
what rank 0 says only. Read by mrl/rollout/sglang_server/held.py.
"""

ACTION = "mrl_digest"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.utils.weight_checker.WeightChecker.handle", handle, HookType.AROUND
    )


def handle(original, checker, action="checksum", *args, **options):
    """WeightChecker.handle with one action more."""
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


def digests(model):
    """`dtype numel replicas digest[,digest...]` of each parameter of this rank.

    Fused experts [E, ...] have one digest an expert. `replicas` neighbouring ranks hold the same
    piece, as far as this rank can tell.
    """
    lines = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        replicas = getattr(modules[name.rpartition(".")[0]], "num_kv_head_replicas", 1)
        if replicas == 1:
            lines[name] = describe(parameter, name, 1)
            continue
        # Fewer key and value heads than ranks: each of them is on several.
        linear = modules[name.rpartition(".")[0]]
        queries = linear.num_heads * linear.head_size
        lines[name + "#q"] = describe(parameter[:queries], name, 1)
        lines[name + "#kv"] = describe(parameter[queries:], name, replicas)
    return lines


def describe(weights, name, replicas):
    from mrl.kernels.digest import weight_digest

    num_experts = weights.shape[0] if ".experts." in name and weights.dim() == 3 else 1
    dtype = str(weights.dtype).removeprefix("torch.")
    sums = ",".join(f"{digest:x}" for digest in weight_digest(weights, num_experts))
    return f"{dtype} {weights.numel()} {replicas} {sums}"
