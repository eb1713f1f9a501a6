"""SGLang plugin: keep prefix keys and token versions right if weights change while requests are in
flight.

It closes three gaps of SGLang 0.5.20. Older releases do not report the version of a token, and the
plugin does nothing there.

- A request's `extra_key` is the version of the weights under which it was sent, and SGLang never
  changes it. After an update, a request that waited in the queue, or that was retracted and is
  computed again, would therefore read prefixes of the older weights. Here the key is renewed
  whenever a request is matched with the prefix cache (`Req.init_next_round_input` with a
  `tree_cache`). A request that keeps its KV cache through an update keeps its key. When it ends,
  its tokens, some of which older weights computed, enter the cache under this older key, which no
  later request uses. The same is true for a prefill in chunks, because only its first chunk is
  matched. A request with an adapter keeps its adapter and its key, to which SGLang has added the id
  of the adapter.
- With the overlapping scheduler (GPUs), a batch may still be running on the device when an in-place
  `pause_generation` returns, and an update would overwrite the weights that this batch reads. Here the
  pause waits for the device.
- SGLang appends the tokens of such a batch after the update, and `record_weight_version_change` would
  attribute them to the newer weights. Here they are attributed to the older weights.
"""

from mrl.engines.sglang.compat import hook, path_of, take

KEY = "mrl-version-"
"""The prefix of a key, as in mrl/engines/sglang/body.py; the version follows."""


def register():
    if not path_of("WeightVersionEvent"):
        return
    hook("Req.init_next_round_input", renew_key, "BEFORE")
    hook("Scheduler.pause_generation", wait_for_device, "AFTER")
    hook("Scheduler.record_weight_version_change", with_pending, "AROUND")


def renew_key(request, tree_cache=None, *args, **options):
    """Renew the key of a request before Req.init_next_round_input looks for a cached prefix. SGLang
    looks for one only if it passes `tree_cache`."""
    has_adapter = getattr(request, "lora_id", None) is not None
    if tree_cache is not None and not has_adapter and (request.extra_key or "").startswith(KEY):
        request.extra_key = KEY + weight_version()


def weight_version():
    return str(take("get_serving")().weight_version)


def wait_for_device(result, *args, **options):
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result


def with_pending(original, scheduler, *args, **options):
    """Run Scheduler.record_weight_version_change. If batches have run but their tokens are not appended
    yet, attribute these tokens to the older weights."""
    old = weight_version()
    pending = {} if not getattr(scheduler, "enable_overlap", False) else pending_tokens(scheduler)
    result = original(scheduler, *args, **options)
    if weight_version() != old:
        for request, num_tokens in pending.values():
            add_pending(request, old, num_tokens)
    return result


def pending_tokens(scheduler):
    """Return {id(request): (request, number of its tokens that are not appended yet)} for the batches
    whose results wait to be read. Speculative decoding, where a batch yields several tokens of a
    request, is not supported."""
    found = {}
    for batch, _ in scheduler.result_queue:
        for request in batch.reqs:
            if not request.finished() and request is not scheduler.chunked_req:
                _, num_tokens = found.get(id(request), (request, 0))
                found[id(request)] = request, num_tokens + 1
    return found


def add_pending(request, old_version, num_tokens):
    """Record that `old_version` sampled the request's output so far, and also the next `num_tokens`
    tokens. The record is a new entry of SGLang's list `weight_version_events`. It replaces an entry
    that ends at the current output."""
    events = request.weight_version_events
    num_before = len(request.output_ids)
    if events and events[-1].num_output_tokens == num_before and num_before:
        events.pop()
    events.append(take("WeightVersionEvent")(old_version, num_before + num_tokens))
