"""SGLang plugin: what an engine that serves mrl's LoRA adapters does beside SGLang's own.

On the path of such engines only.

- POST /weights_checker {"action": "mrl_adapter NAME"} answers with a digest of every matrix that a rank
  holds of adapter NAME, by PEFT's names, with its scale, and with the parts of the slot from which
  batches read it that differ from these. Read by mrl/rollout/sglang/adapter/digests.py. SGLang keeps
  adapters whole in host memory, on every rank, and copies a rank's share into a slot on the device.
- The tokens of a request are stamped with the version of its adapter. SGLang stamps them with the
  version of the base, which is the same for the whole life of the engine.
- A request that is aborted in the queue lets go of its adapter. SGLang forgets that, and would wait
  forever when the adapter is unloaded.
"""

import asyncio
import functools

from mrl.rollout.sglang.compat import hook, parallelism_info, take

ACTION = "mrl_adapter "
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What SGLang joins of an adapter (srt/lora/lora.py, _normalize_weights), in this order."""
EVERY_TOKEN = 1 << 30

rows = {}
"""The rows of each matrix that came, by SGLang's id of an adapter."""
versions = {}
"""The version of an adapter, by SGLang's id."""
releases = set()
"""Tasks under way; the event loop alone would not keep them."""


def register():
    hook("_load_lora_adapter_from_tensors", note_adapter, "BEFORE")
    hook("_unload_lora_adapter", forget_adapter, "BEFORE")
    hook("ModelRunner.check_weights", check_adapter, "AROUND")
    hook("Req.init_next_round_input", stamp, "BEFORE")
    hook("TokenizerManager._handle_abort_req", release, "AROUND")


def note_adapter(manager, reference, tensors, *args, **options):
    rows[reference.lora_id] = {name: tensor.shape[-2] for name, tensor in tensors.items()}
    versions[reference.lora_id] = reference.lora_name.rpartition("@")[2]


def forget_adapter(manager, reference):
    rows.pop(reference.lora_id, None)
    versions.pop(reference.lora_id, None)


def stamp(request, *args, **options):
    """Req.init_next_round_input, which runs before a request is computed, or computed anew."""
    if (version := versions.get(request.lora_id)) is not None:
        request.weight_version_events = [take("WeightVersionEvent")(version, EVERY_TOKEN)]


def release(original, manager, abort):
    """TokenizerManager._handle_abort_req: this request never reaches the place that releases others."""
    state = manager.rid_to_state.get(abort.rid)
    result = original(manager, abort)
    is_over = state is not None and abort.rid not in manager.rid_to_state
    if is_over and manager.enable_lora and state.obj.lora_path:
        task = asyncio.create_task(manager.lora_registry.release(state.obj.lora_id))
        releases.add(task)
        task.add_done_callback(releases.discard)
    return result


def check_adapter(original, runner, action, *args, **options):
    """Answer one action more than ModelRunner.check_weights, on every rank."""
    if not action.startswith(ACTION):
        return original(runner, action, *args, **options)
    try:
        lines = held(runner.lora_manager, action.removeprefix(ACTION))
    except Exception as error:  # the other ranks wait for this one's answer, whatever it is
        lines = {"error": f"{type(error).__name__}: {error}"}
    return {
        "checksums": lines,
        "per_gpu_checksum": "",
        "parallelism_info": parallelism_info(runner._weight_checker, options),
    }


def held(manager, name):
    """Return the digest of each matrix of adapter `name`, in hexadecimal, with `scale` and `slot`."""
    from mrl.kernels.digest import MODULUS, weight_sums

    ids = [ref.lora_id for ref in manager.lora_refs.values() if ref.lora_name == name]
    if not ids:
        raise ValueError(f"there is no adapter {name!r}")
    adapter = manager.loras[ids[0]]
    parts = [
        part
        for layer in adapter.layers
        for key, weights in layer.weights.items()
        for part in matrices(key, weights, rows[ids[0]])
    ]
    sums = weight_sums([(weights, len(names)) for names, weights in parts]).tolist()
    names = [name for names, _ in parts for name in names]
    lines = {name: f"{number % MODULUS:x}" for name, number in zip(names, sums, strict=True)}
    return {**lines, "scale": repr(adapter.scaling), "slot": " ".join(in_slot(manager, ids[0]))}


def matrices(key, weights, rows):
    """Yield ([names], weights) of what SGLang holds under `key`: one name for each equal part."""
    module = key.split(".")[-3]
    names = [key.replace(module, member) for member in FUSED.get(module, ())]
    parts = weights.split([rows[name] for name in names], dim=-2) if names else [weights]
    for name, part in zip(names or [key], parts, strict=True):
        if part.dim() == 3 and len(part) > 1:  # every expert's own, in one tensor
            before, _, after = name.partition(".experts.")
            yield [f"{before}.experts.{number}.{after}" for number in range(len(part))], part
        else:
            yield [name], part


def in_slot(manager, adapter_id):
    """Yield the modules whose slot holds something else of this adapter than it should.

    A slot has room for the largest rank; what is beyond the adapter's own is of no account to dense
    layers, and 0 of experts. Modules that the adapter has not are 0: an earlier one may have had them.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a batch may read the slot that is evicted
    manager.fetch_new_loras({adapter_id})
    pool, adapter = manager.memory_pool, manager.loras[adapter_id]
    slot = pool.get_buffer_id(adapter_id)
    for layer, modules in enumerate(manager.lora_modules):
        held = {
            "A": {name: buffers[layer][slot] for name, buffers in pool.A_buffer.items()},
            "B": {name: buffers[layer][slot] for name, buffers in pool.B_buffer.items()},
        }
        weights = adapter.layers[layer].weights
        for name, module in modules.items():
            if isinstance(module, take("FusedMoEWithLoRA")):
                parts = of_experts(pool, module, weights, held, adapter)
            else:
                parts = of_linear(pool, name, module, weights, held, adapter.config.r)
            for target, matrix, found, expected in parts:
                if not torch.equal(found, expected.to(found)):
                    yield f"{name}.{target}.lora_{matrix}"


def of_linear(pool, name, module, weights, held, rank):
    """Yield (buffer, A or B, what is read of the slot, this rank's part of the matrix)."""
    import torch

    target = take("get_target_module_name")(name, pool.target_modules)
    num_rows = rank * take("get_stacked_multiply")(target, pool.base_model)
    for matrix, cut in (("A", module.slice_lora_a_weights), ("B", module.slice_lora_b_weights)):
        found = held[matrix][target]
        found = found[:num_rows] if matrix == "A" else found[:, :rank]
        own = [each for key, each in weights.items() if f".{name}.lora_{matrix}." in f".{key}"]
        yield target, matrix, found, cut(own[0]) if own else torch.zeros_like(found)


def of_experts(pool, module, weights, held, adapter):
    """Yield (buffer, A or B, the slot, what it should hold of all experts of this rank); B has the
    scale in it, as mem_pool.py puts it there."""
    import torch

    cuts = {"A": module.slice_moe_lora_a_weights, "B": module.slice_moe_lora_b_weights}
    tp_rank, rank, room = module.base_layer.moe_tp_rank, adapter.config.r, pool.max_lora_rank
    for fused in ("gate_up_proj", "down_proj"):
        target = f"{fused}_moe"
        for matrix, cut in cuts.items():
            end = f".{fused}.lora_{matrix}.weight"
            own = {k: w for k, w in weights.items() if ".experts." in k and k.endswith(end)}
            found = held[matrix][target]
            expected = torch.zeros_like(found, device="cpu")
            mine = functools.partial(cut, tp_rank=tp_rank, target_module=target)
            for expert, part in by_expert(pool, own, mine):
                if matrix == "B":
                    expected[expert, :, :rank] = part * adapter.scaling
                    continue
                for number, rows in enumerate(part.split(rank)):  # gate and up, each with room
                    expected[expert, number * room : number * room + rank] = rows
            yield target, matrix, found, expected


def by_expert(pool, own, cut):
    """Return [(its number on this rank, its matrix)] of the experts of this rank."""
    if not own:
        return []
    first = next(iter(own.values()))
    if first.dim() == 2:
        numbers = [int(key.split(".experts.")[1].split(".")[0]) for key in own]
        parts = cut(dict(zip(numbers, own.values(), strict=True)))
        keys = dict.fromkeys(numbers, "")
    else:
        parts, keys = cut(first), ""
        if len(first) == 1:  # shared by all of them
            return [(0, parts[0])]
    return [(expert, part) for expert, part, _ in pool._iter_local_expert_weights(parts, keys)]
