"""SGLang plugin for engines that serve mrl's LoRA adapters. Only such engines have it on their path.

- POST /weights_checker {"action": "mrl_adapter NAME"} answers for adapter NAME. SGLang keeps whole
  adapters in host memory, on every rank, and copies the rank's part into a slot on the device, from
  which batches read it. Every rank reports the digest of each matrix that it holds, the adapter's
  scale, and the modules whose part of the slot differs from these matrices.
  mrl/engines/sglang/adapter/digests.py reads the answer.
- The tokens of a request are reported with the version of its adapter. SGLang would report the version
  of the base model, which never changes.
- A request that is aborted in the queue releases its adapter. Before 0.5.22 SGLang does not release
  it, and would wait forever when the adapter is unloaded.
"""

import asyncio
import functools

from mrl.engines.sglang.compat import hook, parallelism_info, path_of, take

ACTION = "mrl_adapter "
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""For each module into which SGLang joins several matrices: the modules to which these matrices belong,
in the order in which they are joined (srt/lora/lora.py, _normalize_weights)."""
EVERY_TOKEN = 1 << 30

rows = {}
"""The number of rows of each matrix as it was sent, by SGLang's id of the adapter, then by the
matrix's name."""
versions = {}
"""The version of each adapter, by SGLang's id."""
releases = set()
"""Running tasks, stored here because the event loop keeps only weak references to them."""


def register():
    hook("_load_lora_adapter_from_tensors", note_adapter, "BEFORE")
    hook("_unload_lora_adapter", forget_adapter, "BEFORE")
    hook("ModelRunner.check_weights", check_adapter, "AROUND")
    hook("Req.init_next_round_input", stamp, "BEFORE")
    if path_of("TokenizerManager._handle_abort_req"):
        hook("TokenizerManager._handle_abort_req", release, "AROUND")


def note_adapter(manager, reference, tensors, *args, **options):
    rows[reference.lora_id] = {name: tensor.shape[-2] for name, tensor in tensors.items()}
    versions[reference.lora_id] = reference.lora_name.rpartition("@")[2]


def forget_adapter(manager, reference):
    rows.pop(reference.lora_id, None)
    versions.pop(reference.lora_id, None)


def stamp(request, *args, **options):
    """Report the adapter's version for all tokens of a request. This runs before
    Req.init_next_round_input, which SGLang calls each time it begins to compute a request."""
    if (version := versions.get(request.lora_id)) is not None:
        request.weight_version_events = [take("WeightVersionEvent")(version, EVERY_TOKEN)]


def release(original, manager, abort):
    """Run TokenizerManager._handle_abort_req. If this ended the request, release the request's
    adapter, because SGLang's own code that releases adapters is not called for such a request."""
    state = manager.rid_to_state.get(abort.rid)
    result = original(manager, abort)
    is_over = state is not None and abort.rid not in manager.rid_to_state
    if is_over and manager.enable_lora and state.obj.lora_path:
        task = asyncio.create_task(manager.lora_registry.release(state.obj.lora_id))
        releases.add(task)
        task.add_done_callback(releases.discard)
    return result


def check_adapter(original, runner, action, *args, **options):
    """Wrap ModelRunner.check_weights, which runs on every rank, so that actions `mrl_adapter NAME` are
    answered, too."""
    if not action.startswith(ACTION):
        return original(runner, action, *args, **options)
    try:
        lines = held(runner.lora_manager, action.removeprefix(ACTION))
    except Exception as error:  # the other ranks wait for this one, so it must answer
        lines = {"error": f"{type(error).__name__}: {error}"}
    return {
        "checksums": lines,
        "per_gpu_checksum": "",
        "parallelism_info": parallelism_info(runner._weight_checker, options),
    }


def held(manager, name):
    """Return the digest of each matrix of adapter `name` in hexadecimal, by the matrix's name. Two more
    keys are `scale`, with the adapter's scale, and `slot`, with the names of the modules whose matrices
    on the device differ from those in host memory."""
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
    """For each module whose matrices SGLang has joined into the tensor `key`, yield (names, the
    module's part of `weights`).

    If the part is stacked, with one matrix for each expert along the first dimension, `names` has a
    name for each of these matrices. Otherwise `names` has one name.
    """
    module = key.split(".")[-3]
    names = [key.replace(module, member) for member in FUSED.get(module, ())]
    parts = weights.split([rows[name] for name in names], dim=-2) if names else [weights]
    for name, part in zip(names or [key], parts, strict=True):
        if part.dim() == 3 and len(part) > 1:  # one matrix for each expert, in one tensor
            before, _, after = name.partition(".experts.")
            yield [f"{before}.experts.{number}.{after}" for number in range(len(part))], part
        else:
            yield [name], part


def in_slot(manager, adapter_id):
    """Yield a name, ending in `.lora_A` or `.lora_B`, for each part of the adapter's slot on the device
    that differs from the adapter's matrix.

    A slot has room for the largest rank. Rows and columns beyond the adapter's own rank are ignored in
    dense layers, and must be 0 in experts. The slot must be 0 for modules that the adapter does not
    have, because an earlier adapter in this slot may have had them.
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
    """For A and for B of a dense layer, yield (module, "A" or "B", found, expected). `module` is the
    module's name in SGLang's memory pool. `found` is the part of the slot that batches read. `expected`
    is what this part should contain: this rank's part of the matrix, or zeros if the adapter does not
    have the module."""
    import torch

    target = take("get_target_module_name")(name, pool.target_modules)
    num_rows = rank * take("get_stacked_multiply")(target, pool.base_model)
    for matrix, cut in (("A", module.slice_lora_a_weights), ("B", module.slice_lora_b_weights)):
        found = held[matrix][target]
        found = found[:num_rows] if matrix == "A" else found[:, :rank]
        own = [each for key, each in weights.items() if f".{name}.lora_{matrix}." in f".{key}"]
        yield target, matrix, found, cut(own[0]) if own else torch.zeros_like(found)


def of_experts(pool, module, weights, held, adapter):
    """For A and for B of both projections of a layer's experts, yield (module, "A" or "B", found,
    expected).

    `module` is the projection's name in SGLang's memory pool. `found` has the contents of the slot for
    all experts of this rank, and `expected` what the slot should contain. The expected B is multiplied
    by the adapter's scale, because SGLang multiplies B by the scale when it fills the slot
    (mem_pool.py).
    """
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
    """Return [(index of the expert on this rank, its matrix)] for the experts of this rank. A
    matrix that all experts share has index 0. `own` has the adapter's matrices by name, and `cut`
    takes this tensor-parallel rank's part of them."""
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
