"""SGLang plugin: gate weights are returned with the ids of experts (`rollout.return_routing_weights`).

SGLang stores the ids of each token's experts as int32 and returns them with a request. With this
plugin its buffers are twice as wide: K ids, then the bits of the K float32 weights of these
experts, in the same order. moe/trace.py reads ids and weights. The plugin is on the path only if
the recipe asks for the weights.
"""

import torch

from mrl.engines.sglang.compat import hook, take

chosen = []
"""Has one entry while SGLang's capturer runs for a layer, and is empty otherwise. The entry is
int32[tokens, 2K]: for each token the ids of its K experts, and then the bits of the K weights."""


def register():
    hook("RoutedExpertsCapturer.create", widen, "AFTER")
    hook("RoutedExpertsCapturer.capture", with_weights, "BEFORE")
    hook("_post_process_topk_ids", note_weights, "AROUND")


def widen(capturer, *, num_tokens, device, **options):
    """Replace the buffers in which SGLang captures expert ids by buffers with room for weights. Return
    the capturer, which is None if no ids are captured."""
    if capturer is None:
        return None
    if capturer.num_fused_shared_experts:
        raise ValueError("return_routing_weights: shared experts are fused with the routed ones")
    num_layers, width = capturer.num_layers, 2 * capturer.topk_size
    max_batch_size = len(capturer.device_cache.buffer)
    capturer.host_cache.destroy()
    capturer.host_cache = take("BaseHostCache")(
        num_tokens, num_layers, width, "routed_experts", device
    )
    capturer.device_cache = take("BaseDeviceCache")(
        max_batch_size, num_layers, width, device, "routed_experts"
    )
    capturer.topk_size = width
    return capturer


def note_weights(original, *, topk_ids, topk_weights, **options):
    """Run SGLang's function `original`, which captures the ids. While it runs, `chosen` holds the ids
    and the bits of the weights."""
    bits = topk_weights.float().contiguous().view(torch.int32)
    chosen[:] = [torch.cat([topk_ids.int(), bits], dim=1)]
    try:
        return original(topk_ids=topk_ids, topk_weights=topk_weights, **options)
    finally:
        chosen.clear()


def with_weights(capturer, layer_id, topk_indices):
    [row] = chosen
    return (capturer, layer_id, row), {}
