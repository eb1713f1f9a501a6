"""What the trainer asks of a rollout engine.

One engine's life:

    start() -> wake(WEIGHTS) -> update_weights() -> wake(KV_CACHE, CUDA_GRAPH)
            -> sequence_logprobs(), generate() -> sleep(level) -> wake(WEIGHTS) -> ... -> stop()

After start() everything is resident and the weights are the checkpoint's. An engine that is asked
for something its state does not allow raises RuntimeError that names the state. One whose process
died or hangs raises EngineLost, whatever it was asked; start() then brings up another.

An engine with an adapter (mrl/config/adapter.py) keeps the checkpoint's weights as its base: updates
bring the adapter's matrices, and requests finish with the version that they were sent under. Before the
first update its requests go to the base.

An engine generates token sequences. What is asked for and in which order, groups and long tails are
the business of mrl/collect/single_turn.py.

Dimensions: P tokens of a request, C tokens of its completion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from mrl.errors import RunFailed
from mrl.sampling_mask import SamplingMask
from mrl.types import RoutingTrace, VersionSpan, WeightBucket

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
MEMORY_TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
"""What an engine holds on the device and can give back, in the order in which it wakes."""

PauseMode = Literal["in_place", "retract"]

PORT_CLASH = "a port was already in use"
"""Words in the error of a start that failed since another program had just taken a port."""
START_ATTEMPTS = 3
"""The number of starts, each with other ports, before such an error ends the run."""


class EngineLost(RuntimeError):
    """The engine's process died, hangs, or failed again and again: its requests and weights are gone.

    The message says in one line what happened, and where the log is. start() brings up another engine.
    """

    is_explained = False
    """Whether the engine died while requests ran alone in it, which are not tried again."""


class RequestFailed(RunFailed):
    """One request cannot be answered, and the others can: the engine refused it, or died with it twice,
    once among others and once alone."""


class EndsEngine(RequestFailed):
    """Is raised for a request with which an engine died twice, the second time with no others in it."""


MAX_STOP_STRINGS = 32
"""SGLang takes no more (sampling/sampling_params.py, MAX_STOP_COUNT)."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled. Greedy is `temperature=0`."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """No end of sequence before this many tokens; equal to max_new_tokens for one exact length."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Number of the likeliest tokens that are sampled from; -1 takes all."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that stop a completion beside the model's own end-of-sequence ids."""
    stop: tuple[str, ...] = ()
    """Texts that stop a completion. The token that completes one is the completion's last."""
    sampling_mask: bool = False
    """Return the tokens that `top_p` and `top_k` kept, and log-probs over them."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: expected 0 to max_new_tokens ({self.max_new_tokens}), got "
                f"{self.min_new_tokens}"
            )
        if self.temperature < 0:
            raise ValueError(f"temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, or -1 for all, got {self.top_k}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop: expected at most {MAX_STOP_STRINGS}, got {len(self.stop)}")
        if "" in self.stop:
            raise ValueError("stop: got an empty text, which stops before anything is generated")


@dataclass(frozen=True)
class Request:
    """Tokens to be continued: a prompt, or a prompt with what was generated so far."""

    request_id: str
    """Unique among the requests in flight."""
    token_ids: Tensor
    """i64[P]."""
    seed: int
    """A completion's token at position p is a function of (weights, tokens before p, seed, p)."""
    sampling: SamplingParams


@dataclass(frozen=True)
class Completion:
    """A completion is what an engine made of a request; positions are relative to its first token."""

    request_id: str
    output_ids: Tensor
    """i64[C]; an aborted completion holds what there was but for its last token (of which nobody
    knows whether it was the end), maybe nothing."""
    logprobs: Tensor
    """f32[C]: the engine's, at the sampling temperature; of the truncated distribution where there is
    a sampling mask, else of the whole one."""
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: tuple[VersionSpan, ...]
    """Cover [P, P + C) in order."""
    routing: RoutingTrace | None
    """The routes of all P + C - 1 routed tokens; None where routes are off, or nothing was
    generated."""
    num_retractions: int = 0
    """Times that the engine took the request back for want of memory and computed it anew."""
    sampling_mask: SamplingMask | None = None
    """The sets of the C tokens, where `SamplingParams.sampling_mask` asks for it."""


@dataclass(frozen=True)
class SyncReport:
    """What a weight sync moved, and what took how long; the rest of its time was gathering."""

    num_bytes: int
    push_s: float
    """Until the engine had loaded every bucket."""
    digest_s: float
    """Digests of what was sent, the exporter's included (`WeightBucket.digest_s`), of what the engine
    holds, and their comparison."""


class RolloutEngine(Protocol):
    """A file of mrl/rollout/ offers one as `Engine`, or as a function `build_engine`.

    The constructor's keywords are those of `mrl.rollout.sglang.engine.Engine`. All methods block,
    and all may raise EngineLost.

    Threads: one thread controls the engine and calls everything but generate() and abort(), which may
    be called from any thread, also between two completions. Several calls of generate() may be open at
    once where all of them say `beside_others`; each iterator belongs to one thread at a time. pause(),
    update_weights() and resume() act on all open calls; sleep(), sequence_logprobs() and
    start_profile() are refused while one is open.
    """

    def start(self, address: str = "", meanwhile: Callable[[], None] | None = None) -> None:
        """Load the checkpoint and get ready to generate; `weight_version` is the first version.

        The arguments are given to engines that span nodes only: `address` (host:port, the host is this
        machine) is where their processes meet, and `meanwhile` is called again and again until the
        engine is ready; it raises RuntimeError where another node has failed.

        Raises InputError for what the user can mend in the recipe, RuntimeError with the log's last
        lines and its path where the engine dies or is not ready in time, and where it runs already.
        After EngineLost it first clears away what is left of the lost one.
        """
        ...

    @property
    def weight_version(self) -> int | None:
        """The version that generate() would use; None where the weights were dropped."""
        ...

    @property
    def process_id(self) -> int | None:
        """The id of the engine's first process, whose memory is watched; None where none runs."""
        ...

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take device memory back for `tags`; a tag that is awake already is left alone.

        Weights dropped by sleep(2) come back as memory without contents: update_weights() next.
        Raises ValueError for an unknown tag.
        """
        ...

    def sleep(self, level: int = 2) -> None:
        """Give device memory back. Level 1 keeps the weights in host memory, level 2 drops them.

        The prefix cache is lost either way. What sleeps already is left alone. Raises ValueError
        for another level, RuntimeError where the engine was not built for level 1, and for level 2
        with an adapter: no update would bring back its base.
        """
        ...

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        """Load a whole model, bucket by bucket, and prove that the engine holds what was sent.

        Needs WEIGHTS awake, and pause() where a call of generate() is open; calls that begin meanwhile
        wait for the end. Names are Hugging Face's; the last bucket says so (`is_last`). Raises
        ValueError where a bucket carries another version, a weight is missing, unknown, repeated or of
        another shape, or a paused engine has had `version` before, and RuntimeError where the engine
        refuses a bucket, or holds other weights in the end than were sent. After an error the weights
        are a mixture: generate() is refused until an update succeeds.

        With an adapter the buckets bring all of its matrices, 2-D and under PEFT's names, and no pause
        is needed: requests in flight finish with their own version, also where the update fails, and
        a version that no request uses is dropped.
        """
        ...

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return log-probs f32[T] of sequences i64[T] under the present weights at temperature 1.

        The first token has none, so it gets 0. Needs every tag awake. Raises ValueError for a sequence
        that is empty or longer than the context.
        """
        ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        reuse_cache: bool = False,
        beside_others: bool = False,
        stale_prefixes: bool = False,
    ) -> Iterator[Completion]:
        """Yield completions in the order in which they finish, each exactly once.

        Needs every tag awake. All requests reach the engine at once and in order, so that on a CPU
        the completions are the same bits whenever the same requests are made; `reuse_cache` keeps the
        prefix cache of the call before, for turns of a conversation.

        `beside_others` allows other such calls at the same time; their request ids must differ. The
        engine batches what is there, so the last bits depend on what else runs, and the prefix cache is
        kept. A request then reads only what its own weights have cached: SGLang's `extra_key` is the
        weight version. With `stale_prefixes` it reads what any weights have cached. Such a call waits
        while the engine is paused or its weights change.

        Leaving the iterator early aborts what is left. Raises ValueError, before anything is sent, for
        a request that is empty, has another's id, is too long for the context or the KV cache, or has
        tokens or sampling that the model does not have; RequestFailed for one that the engine refuses;
        RuntimeError if it answers with wrong weights, a wrong length, or NaN; EngineLost if it dies,
        its scheduler does not respond for `rollout.stall_timeout_s`, it fails a request repeatedly, or
        it is idle and has not answered for `rollout.request_timeout_s`; RunFailed if it is still busy
        then. Results yielded before remain valid. Nothing is sent before the first `next()`.
        """
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests of generate(), or all: they come back with finish_reason `abort`."""
        ...

    def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop generating in mid-flight, so that update_weights() may follow; calls of generate() that
        begin meanwhile wait for resume().

        `in_place` keeps the KV cache of running requests: tokens after the update attend to keys and
        values of the older weights. `retract` gives it back, and after resume() it is computed anew;
        which rows of routes before the update are whose is then unknown, so that under R3 the tokens
        sampled before the update leave the loss. To keep them, abort() the requests, update, and send
        what there is as new requests (mrl.collect.single_turn does so for partial rollouts).

        No request reads a prefix of older weights from the cache after the update, running ones
        included: a retracted request, or one that had not begun, gets the key of the new version
        (plugins/server/mrl_weight_versions.py), and what a running one leaves in the cache stays under
        the old key, which nobody uses again. Calls with `stale_prefixes`, or alone, have no keys: what
        they read of another version is marked as such or as UNKNOWN_VERSION in
        `RoutingTrace.row_versions`. A call alone that ends while paused resumes the engine.
        """
        ...

    def resume(self) -> None:
        """Go on with what pause() stopped."""
        ...

    def start_profile(self, folder: Path, name: str, *, with_stack: bool) -> None:
        """Begin a trace of what is generated. Every process of the engine writes its own into `folder`,
        in a file whose name begins with `name`. An engine need not have this and `stop_profile`.

        Raises RuntimeError where the engine cannot.
        """
        ...

    def stop_profile(self) -> None:
        """End the trace and write it."""
        ...

    def stop(self) -> None:
        """Leave no process behind. Harmless when repeated or never started."""
        ...


class RolloutNode(Protocol):
    """An engine's process on a node that does not lead it: the attribute `Node` of the engine's class.

    Engines without one stay on a node. The constructor's keywords are those of
    `mrl.rollout.sglang.node.EngineNode`.
    """

    def start(self, address: str) -> None:
        """Start the process, after clearing away a former one, and do not wait for it."""
        ...

    def note_ready(self) -> None:
        """Told when the engine has started on all nodes."""
        ...

    def failure(self) -> str:
        """Why it has ended, and where its log is; empty while it runs."""
        ...

    def stop(self) -> None:
        """Leave no process behind. Harmless when repeated or never started."""
        ...


def sample_seed(seed: int, prompt_id: str, index: int) -> int:
    """Return the sampling seed of sample `index` of a prompt: 63 bits, stable across runs and
    machines."""
    text = f"{seed}/{index}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def engine_seed(seed: int, *counts: int) -> int:
    """Return the seed of an engine's own random numbers: 31 bits, stable across runs and machines.

    `counts` are what must not share them: an engine's number, the step that a run resumes from, the
    starts of a server. They matter where sampling does not follow the seeds of the requests.
    """
    text = "/".join(str(number) for number in (seed, *counts)).encode()
    # SGLang hands it to NumPy, which takes 32 bits.
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1
