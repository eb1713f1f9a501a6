"""SGLang plugin: requests with the same prompt compute the prompt once.

The samples of a prompt reach the scheduler together, so SGLang would put them into one prefill batch
and compute the prompt once for each of them, because a prompt enters the prefix cache only after its
prefill. Here the first request of a prompt is prefilled, and the other requests of the same prompt stay
in the queue until its first token exists, one or two batches later. Then they read the prompt from the
prefix cache, except for its last token.

All ranks of an engine have the same queue and the same requests, so they make the same choices.
"""

from mrl.engines.sglang.compat import hook, path_of, take

MIN_TOKENS = 32
"""A request waits only if it would then read at least this many more tokens from the prefix cache.
SGLang has the same threshold for prefixes that requests in its queue share."""
MAX_BATCHES = 32
"""For how many batches a request may wait. It waits so long only if the prefill of the first request
has more chunks than this, or if the first request was dropped before its prefill."""


class Prompts:
    """The prompts that are being computed: for each the first request, which has no token yet."""

    def __init__(self):
        self._firsts, self._adder = {}, None

    def begin_batch(self, adder):
        """Forget the prompts that are computed, if `adder` (PrefillAdder) forms another batch than in
        the last call."""
        if adder is self._adder:
            return
        self._adder = adder
        self._firsts = {
            key: (request, num_batches + 1)
            for key, (request, num_batches) in self._firsts.items()
            if is_computing(request) and num_batches < MAX_BATCHES
        }

    def has_other(self, request):
        """Return whether another request is computing the prompt of `request`."""
        first, _ = self._firsts.get(key_of(request), (request, 0))
        return first is not request

    def add(self, request):
        """Record that `request` is computing its prompt."""
        self._firsts[key_of(request)] = request, 0


prompts = Prompts()


def register():
    hook("PrefillAdder.add_one_req", wait_for_prompt, "AROUND")


def wait_for_prompt(original, adder, request, *args, **options):
    """Run PrefillAdder.add_one_req, which adds a request to the next prefill batch if it fits, or
    leave the request in the queue because another request is computing its prompt."""
    if must_wait(adder, request):
        return take("AddReqResult").CONTINUE
    result = original(adder, request, *args, **options)
    record(adder, request)
    return result


def must_wait(adder, request):
    """Return whether another request is computing the prompt of `request`."""
    if not can_share(adder, request):
        return False
    prompts.begin_batch(adder)
    return prompts.has_other(request)


def record(adder, request):
    """Record that `request` is computing its prompt, if `adder` has just added it to the batch."""
    if any(each is request for each in adder.can_run_list[-1:]) and can_share(adder, request):
        prompts.add(request)


def can_share(adder, request):
    """Return whether `request` can read more of its prompt from the prefix cache after another request
    has computed it, or is the request that computes it for others."""
    # A request that SGLang leaves in the queue keeps its slot of recurrent state.
    if getattr(adder.tree_cache, "disable", True) or adder.is_hybrid_ssm_cache:
        return False
    num_tokens = len(request.origin_input_ids)
    # A request for the log-probs of its prompt computes the prompt itself.
    wants_prompt = request.return_logprob and 0 <= request.logprob_start_len < num_tokens - 1
    # The last token is always computed, and the cache gives whole pages.
    num_shared = (num_tokens - 1) // adder.page_size * adder.page_size
    num_more = num_shared - num_cached(request)
    return num_more >= MIN_TOKENS and is_computing(request) and not wants_prompt


def num_cached(request):
    """Return how many tokens of a request SGLang has just found in the prefix cache."""
    name = path_of("Req.prefix").rpartition(".")[2]
    found = getattr(request, name)
    return found if isinstance(found, int) else len(found)


def key_of(request):
    """Return what two requests must have in common to share a prompt in the prefix cache."""
    salt = getattr(request, "cache_salt", None)
    return request.extra_key, salt, request.lora_id, tuple(request.origin_input_ids)


def is_computing(request):
    """Return whether a request has neither ended nor a first token."""
    return not request.output_ids and not request.finished()
