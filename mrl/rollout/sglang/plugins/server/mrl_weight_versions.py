"""SGLang plugin: weights that change under requests in flight leave no cached prefix or stamp wrong.

Written against 0.5.20, which has three gaps; older versions stamp no tokens and are left alone.

- A request's `extra_key` names the weights that it was sent under, and SGLang keeps it for the whole
  life of the request. One that waits in the queue through an update, or that is retracted and computed
  anew after it, would read prefixes of the older weights. Here the key is renewed whenever a request is
  matched against the prefix cache (`Req.init_next_round_input` with a tree). A request that keeps its
  KV cache through an update keeps its key too: what it files at its end, of which a part is of older
  weights, is filed under the older key, which no request asks for any more. The same holds for a
  prefill in chunks, whose later chunks are not matched again. A request of an adapter keeps its key for
  life, as it keeps the adapter: SGLang has put the adapter's id into it.
- With the overlapping scheduler (GPUs) a batch is on the device when `pause_generation` in place
  returns, and an update would overwrite the weights that it reads. Here the pause waits for the device.
- The token of that batch is appended after the update, and `record_weight_version_change` would give
  it to the newer weights.
"""

from mrl.rollout.sglang.compat import hook, path_of, take

KEY = "mrl-version-"
"""What a key begins with, as in mrl/rollout/sglang/body.py; the version follows."""


def register():
    if not path_of("WeightVersionEvent"):
        return
    hook("Req.init_next_round_input", renew_key, "BEFORE")
    hook("Scheduler.pause_generation", wait_for_device, "AFTER")
    hook("Scheduler.record_weight_version_change", with_pending, "AROUND")


def renew_key(request, tree_cache=None, *args, **options):
    """Req.init_next_round_input, before it looks for a prefix: only with a tree it does."""
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
    """Scheduler.record_weight_version_change that knows the tokens of a batch that has run already."""
    old = weight_version()
    pending = {} if not getattr(scheduler, "enable_overlap", False) else pending_tokens(scheduler)
    result = original(scheduler, *args, **options)
    if weight_version() != old:
        for request, num_tokens in pending.values():
            add_pending(request, old, num_tokens)
    return result


def pending_tokens(scheduler):
    """{id: (request, tokens)} of the batches whose results wait to be read; speculative decoding, which
    makes several tokens at once, is not known here."""
    found = {}
    for batch, _ in scheduler.result_queue:
        for request in batch.reqs:
            if not request.finished() and request is not scheduler.chunked_req:
                _, num_tokens = found.get(id(request), (request, 0))
                found[id(request)] = request, num_tokens + 1
    return found


def add_pending(request, old_version, num_tokens):
    """Let the last event of `request` cover `num_tokens` more of the old version."""
    events = request.weight_version_events
    num_before = len(request.output_ids)
    if events and events[-1].num_output_tokens == num_before and num_before:
        events.pop()
    events.append(take("WeightVersionEvent")(old_version, num_before + num_tokens))
