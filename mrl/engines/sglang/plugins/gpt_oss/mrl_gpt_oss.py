"""SGLang plugin for servers with a gpt-oss model.

1. The trainer sends the weights of each expert apart, in buckets that can end between two experts.
   SGLang's loader takes only tensors with all experts of a layer. Here each weight is copied to its
   place in the layer's parameters.
2. On CPUs, mrl asks for the attention backend `intel_amx`, the only one for CPUs that SGLang takes for
   this model. Without AMX, SGLang then falls back to `torch_native`, which has no sinks. Here both
   names stand for `torch_native` with sinks: a loop in Python that computes one request after the
   other. SGLang keeps the sinks in bf16, whatever the model's dtype is. Here they have the model's
   dtype.

Dimensions: n new tokens of a request, L tokens of it in the cache, h heads, g groups of keys and
values, d head size, E experts of this rank, I feed-forward size of this rank, H hidden size.
"""

import re

import torch

from mrl.engines.sglang.compat import hook, take

EXPERT = re.compile(
    r"(?P<layer>model\.layers\.\d+\.mlp\.experts)\.(?P<expert>\d+)\."
    r"(?P<part>gate|up|down)_proj\.(?P<kind>weight|bias)"
)
"""Matches the name of an expert's weight or bias, as the trainer sends it."""


def register():
    hook("GptOssForCausalLM.load_weights", load_weights, "AROUND")
    if not torch.cuda.is_available():
        hook("GptOssAttention.__init__", keep_dtype, "AROUND")
        take("ATTENTION_BACKENDS").update(intel_amx=create_backend, torch_native=create_backend)


def load_weights(original, model, weights, **options):
    """Load weights: those of single experts here, all others with SGLang's function `original`."""
    others = []
    for name, tensor in weights:
        if found := EXPERT.fullmatch(name):
            load_expert(model, tensor, **found.groupdict())
        else:
            others.append((name, tensor))
    if others:
        original(model, others, **options)


def load_expert(model, tensor, layer, expert, part, kind):
    """Copy an expert's weight or bias to its place on this rank, if the rank has the expert.

    w13_weight is [E, 2 I, H], with the rows of gate and up in turns, w2_weight is [E, H, I], and the
    biases are [E, 2 I] and [E, H]. Of the ranks that split an expert, the first has the second bias,
    and the others have zeros.
    """
    experts = model.get_submodule(layer)
    experts = getattr(experts, "base_layer", experts)  # a layer with adapters wraps it
    own = experts._map_global_expert_id_to_local_expert_id(int(expert))
    if own < 0:
        return
    rank, size = experts.moe_tp_rank, experts.moe_tp_size
    suffix = "_weight" if kind == "weight" else "_weight_bias"
    if part != "down":
        place = getattr(experts, "w13" + suffix).data[own, int(part == "up") :: 2]
        tensor = tensor.chunk(size)[rank]
    else:
        place = getattr(experts, "w2" + suffix).data[own]
        if kind == "weight":
            tensor = tensor.chunk(size, dim=1)[rank]
        elif rank:
            tensor = torch.zeros_like(tensor)
    if place.shape != tensor.shape:
        raise RuntimeError(
            f"{layer}: expert {expert} has {part}_proj.{kind} {list(tensor.shape)} on this rank, but "
            f"SGLang keeps it as {list(place.shape)}; expected a layout with the rows of gate and up "
            "in turns, as of rollout.server_args.moe_runner_backend=triton"
        )
    place.copy_(tensor)


def keep_dtype(original, attention, *args, **options):
    """Build an attention layer whose sinks have the dtype of its other weights."""
    original(attention, *args, **options)
    sinks = attention.sinks.data.to(attention.qkv_proj.weight.dtype)
    attention.sinks = torch.nn.Parameter(sinks, requires_grad=False)


def create_backend(runner):
    """Return SGLang's `torch_native` backend, with attention that has sinks."""
    methods = {"forward_extend": forward_extend, "forward_decode": forward_decode}
    return type("SinkAttnBackend", (take("TorchNativeAttnBackend"),), methods)(runner)


def forward_extend(backend, q, k, v, layer, batch, save_kv_cache=True, *, sinks):
    return forward(backend, q, k, v, layer, batch, save_kv_cache, sinks, batch.extend_seq_lens)


def forward_decode(backend, q, k, v, layer, batch, save_kv_cache=True, *, sinks):
    ones = torch.ones_like(batch.seq_lens)
    return forward(backend, q, k, v, layer, batch, save_kv_cache, sinks, ones)


def forward(backend, q, k, v, layer, batch, save_kv_cache, sinks, num_new):
    """Compute attention of the new tokens of each request: q [T, h d] for the T new tokens of all
    requests -> [T, h d]. `num_new` has the number of new tokens of each request."""
    pool = backend.token_to_kv_pool
    if save_kv_cache and k is not None:
        location = take("KVWriteLoc")(batch.out_cache_loc, backend.swa_out_cache_loc)
        pool.set_kv_buffer(layer, location, k, v)
    heads = (layer.tp_q_head_num, layer.qk_head_dim)
    queries, out = q.reshape(-1, *heads), torch.zeros_like(q).reshape(-1, *heads)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    slots, start = backend.req_to_token_pool.req_to_token, 0
    window = layer.sliding_window_size
    rows = (batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), num_new.tolist())
    for request, length, count in zip(*rows, strict=True):
        own, end = slots[request, :length], start + count
        out[start:end] = attend(
            queries[start:end], keys[own], values[own], sinks, layer.scaling, window
        )
        start = end
    return out.view(q.shape[0], -1)


def attend(queries, keys, values, sinks, scale, window):
    """Attend with the last n tokens of a request: queries [n, h, d], keys and values [L, g, d], sinks
    [h] -> [n, h, d].

    A query sees its own key and, with a window, that many keys before it; `window` is None or negative
    without one.
    """
    (n, h, d), (length, g) = queries.shape, keys.shape[:2]
    grouped = queries.float().view(n, g, h // g, d)
    scores = torch.einsum("ngrd,lgd->grnl", grouped, keys.float()) * scale
    position = torch.arange(length - n, length).unsqueeze(1)
    other = torch.arange(length)
    hidden = other > position
    if window is not None and window >= 0:
        hidden |= other < position - window
    scores = scores.masked_fill(hidden, float("-inf"))
    sink = sinks.float().view(g, h // g, 1, 1).expand(-1, -1, n, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return (
        torch.einsum("grnl,lgd->ngrd", weights, values.float()).reshape(n, h, d).to(queries.dtype)
    )
