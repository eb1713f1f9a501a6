"""The contract of a rollout engine.

An engine is an `EngineServer`, one server process, with a `PolicyEndpoint` for each policy that it
serves. The server is started, put to sleep and stopped as a whole; an endpoint receives the weights of
one policy and answers requests for it. An engine with one policy (`RolloutEngine`) is used like this:

    start() -> wake(WEIGHTS) -> endpoint.update_weights() -> wake(KV_CACHE, CUDA_GRAPH)
            -> endpoint.sequence_logprobs(), endpoint.generate()
            -> sleep(level) -> wake(WEIGHTS) -> ... -> stop()

After start() all memory is on the device, and the weights are those of the checkpoint. A call that the
current state does not allow raises RuntimeError, which names the state. Once the process has died or
hangs, every call raises EngineLost; start() then starts another process.

If an engine serves adapters (mrl/config/adapter.py), its base model keeps the checkpoint's weights.
Updates load the matrices of an adapter, and a request finishes with the version under which it was
sent. Before the first update, the base model answers requests.

An engine generates token sequences. Prompts, sample groups and long tails are handled in
mrl/collect/single_turn.py.

Dimensions: P tokens of a request, C tokens of its completion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from mrl.config import ModelConfig, RolloutConfig
from mrl.config.adapter import Adapter
from mrl.engines.sampling import SamplingParams
from mrl.errors import RunFailed
from mrl.sampling_mask import SamplingMask
from mrl.types import RoutingTrace, VersionSpan, WeightBucket

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
MEMORY_TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
"""The parts of an engine's device memory that it can release, in the order in which they wake."""

PauseMode = Literal["in_place", "retract"]

PORT_CLASH = "a port was already in use"
"""Part of the error message when a start fails because another program has just taken a port."""
START_ATTEMPTS = 3
"""How many times a start is tried, each time with other ports, before a port clash ends the run."""


class EngineLost(RuntimeError):
    """The engine died, hangs, or failed a request repeatedly: its requests and weights are gone.

    The message is one line: what happened, and the path of the log. start() starts another process.
    """

    is_explained = False
    """Whether a call that ran alone in the engine caused the loss. Such a call is not retried."""


class RequestFailed(RunFailed):
    """One request was refused, or was in flight when two engines died. Other requests can go on."""


class EndsEngine(RequestFailed):
    """Two engines died with this request in flight. In the second one, no other call was running."""


@dataclass(frozen=True)
class Request:
    """Tokens to continue: a prompt, or a prompt and the part of its answer generated so far."""

    request_id: str
    """Unique among the requests in flight."""
    token_ids: Tensor
    """i64[P]: the ids of the tokens to continue."""
    seed: int
    """Sampling seed: the token at position p is a function of (weights, tokens before p, seed, p)."""
    sampling: SamplingParams


@dataclass(frozen=True)
class Completion:
    """The answer to one request. Positions count from the first token of the request."""

    request_id: str
    output_ids: Tensor
    """i64[C]. An aborted completion has the tokens generated so far (possibly none) except the last,
    because it is unknown whether the last token ended the sequence."""
    logprobs: Tensor
    """f32[C]: the engine's log-probs at the sampling temperature. They are normalized over the kept
    tokens if there is a sampling mask, otherwise over the whole vocabulary."""
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: tuple[VersionSpan, ...]
    """Spans that cover [P, P + C) in order, each with the weight version that sampled its tokens."""
    routing: RoutingTrace | None
    """Routes of the first P + C - 1 tokens; the last token is not fed to the model. None if routes are
    off or nothing was generated."""
    num_retractions: int = 0
    """How often the engine retracted the request for lack of KV memory, and later recomputed it."""
    sampling_mask: SamplingMask | None = None
    """The kept tokens for each of the C tokens; None unless `SamplingParams.sampling_mask` is set."""


@dataclass(frozen=True)
class SyncReport:
    """Size and timings of a weight update. The update's other seconds went into gathering weights."""

    num_bytes: int
    push_s: float
    """Seconds spent on sending buckets to the engine and waiting until it had loaded them."""
    digest_s: float
    """Seconds spent on computing digests of the exported weights (`WeightBucket.digest_s`), of the
    received buckets and of the weights in the engine, and on comparing these digests."""


@dataclass(frozen=True)
class EngineConfig:
    """All arguments of an engine's constructor, which starts no process."""

    model: ModelConfig
    rollout: RolloutConfig
    log_path: Path
    return_routes: bool = True
    gpu_ids: Sequence[int | str] = ()
    """GPUs of the ranks on this node, as in CUDA_VISIBLE_DEVICES; empty for an engine on CPUs."""
    cpu_threads: int = 1
    """Number of CPU threads of each rank of an engine on CPUs."""
    seed: int = 0
    """Seed of the engine's own random numbers, which change with every start(). They matter only where
    sampling ignores the seeds of requests: on GPUs without deterministic inference."""
    keep_weights_on_host: bool = False
    """Whether sleep(1), which keeps a copy of the weights in host memory, is allowed on GPUs."""
    num_nodes: int = 1
    """Number of nodes over which the `rollout.tensor_parallel_size` ranks are spread evenly."""
    weight_push: Callable[..., Any] | None = None
    """Makes the sender of weights (`Push` in mrl/weight_sync/transports); None for the default one."""
    adapter: Adapter | None = None
    """If set, updates load only the matrices of this adapter, and only sleep(1) is allowed."""


class EngineServer(Protocol):
    """One server process. Only one thread may call its methods; they block and may raise EngineLost."""

    def start(self, address: str = "", meanwhile: Callable[[], None] | None = None) -> None:
        """Load the checkpoint and get ready to generate; `weight_version` is then 0.

        Both arguments are only for engines that span nodes. The engine's processes meet at `address`
        (host:port on this machine). `meanwhile` is called repeatedly until the engine is ready, and
        raises RuntimeError if another node has failed.

        Raises InputError for a mistake in the recipe, and RuntimeError if the engine is running
        already, dies, or is not ready in time. In the last two cases the error has the path and the
        last lines of the log. After EngineLost, this first removes what is left of the lost process.
        """
        ...

    def stop(self) -> None:
        """End every process that start() has started. A second call does nothing."""
        ...

    @property
    def process_id(self) -> int | None:
        """Id of the engine's first process, whose memory is watched; None if no engine is running."""
        ...

    def wake(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Allocate device memory again for those of `tags` that are asleep.

        Weights that sleep(2) dropped come back as memory without contents: call update_weights() next.
        Raises ValueError for an unknown tag.
        """
        ...

    def sleep(self, level: int = 2) -> None:
        """Release all device memory that is awake. Level 1 keeps the weights in host memory, level 2
        drops them. Both levels drop the prefix cache.

        Raises ValueError for another level. Raises RuntimeError while a call of generate() is open, for
        level 1 if the engine cannot keep its weights on the host, and for level 2 with an adapter,
        because no update would restore the base model.
        """
        ...

    def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop generating, for all requests of the server, to allow update_weights(). Calls of
        generate() that begin while the server is paused wait for resume().

        `in_place` keeps the KV cache of running requests: tokens after the update attend to keys and
        values of the older weights. `retract` drops this cache, which is computed again after resume().
        Which weights chose the routes of earlier tokens is then unknown, so routing replay (r3)
        excludes these tokens from the loss. To keep them, abort() the requests, update, and send prompt
        and partial answer as new requests (mrl.collect.single_turn does so for partial rollouts).

        The prefix cache stores prefixes under keys, which name the weight version. After the
        update, a request that was retracted or had not begun gets the key of the new version, so it
        reads nothing that older weights computed (plugins/server/mrl_weight_versions.py). A running
        request keeps the old key, which no later request uses. On a server with one policy, calls
        that have `stale_prefixes` or are not `concurrent` use no key, and may read what older
        weights computed (see `RoutingTrace.row_versions`). If a call that is not `concurrent` ends
        during the pause, a server with one policy resumes.
        """
        ...

    def resume(self) -> None:
        """Continue after pause()."""
        ...

    def start_profile(self, folder: Path, name: str, *, with_stack: bool) -> None:
        """Start to trace generation. Each process of the engine will write one file into `folder`; the
        file's name begins with `name`. An engine may lack this method and `stop_profile`.

        Raises RuntimeError while a call of generate() is open, or if the engine refuses.
        """
        ...

    def stop_profile(self) -> None:
        """End the trace, and return when its files are written."""
        ...


class PolicyEndpoint(Protocol):
    """One policy that a server serves. All methods block, and all may raise EngineLost.

    generate() and abort() may be called from any thread, even between two completions. Several calls
    of generate() may be open at once if all of them are `concurrent`; only one thread at a time may use
    the iterator of a call. All other methods are for one thread. update_weights() changes the weights
    for all open calls. sequence_logprobs() raises RuntimeError while a call is open.
    """

    @property
    def weight_version(self) -> int | None:
        """The version that generate() would use; None if the weights were dropped."""
        ...

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> SyncReport:
        """Load a whole model, bucket by bucket, and prove that the engine holds what was sent.

        WEIGHTS must be awake. While a call of generate() is open, the server must be paused. Calls
        that begin during the update wait until it ends. Weights have Hugging Face's names, and only
        the last bucket has `is_last`. Raises ValueError if a bucket carries another version, if a
        weight is missing, unknown, repeated or of another shape, or if the engine is not idle and has
        had `version` before. Raises RuntimeError if the engine refuses a bucket, or ends up with
        weights other than those sent. After an error, generate() raises until an update succeeds.

        With an adapter, the buckets contain all of its matrices, 2-D and under PEFT's names. No pause
        is needed: a request in flight finishes with the version under which it was sent, even if the
        update fails. Versions that no request uses any more are dropped.
        """
        ...

    def sequence_logprobs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return log-probs f32[T] of sequences i64[T] under the current weights at temperature 1.

        The first token has no log-prob and gets 0. All memory must be awake. Raises ValueError for a
        sequence that is empty or longer than the context.
        """
        ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        reuse_cache: bool = False,
        concurrent: bool = False,
        stale_prefixes: bool = False,
    ) -> Iterator[Completion]:
        """Yield each completion exactly once, in the order in which they finish.

        All memory must be awake. All requests reach the engine at once and in order, so that on a CPU
        the same requests always give the same bits. `reuse_cache` keeps the prefix cache of the
        previous call: the next turn of a conversation can use it.

        `concurrent` allows other concurrent calls at the same time; no two open calls may share a
        request id. The engine batches requests of all calls, so the last bits of log-probs depend on
        other requests, and the prefix cache is kept. A request reads only cached prefixes that its own
        weights computed or, with `stale_prefixes`, that any weights computed. A concurrent call waits
        while the engine is paused or its weights change.

        Nothing is sent before the first `next()`. Leaving the iterator early aborts the remaining
        requests. Raises ValueError, before anything is sent, for a request that is empty, repeats an
        id, is too long for the context or the KV cache, or exceeds the vocabulary or the sampling
        limits; RequestFailed if the engine refuses a request; RuntimeError for an answer from the wrong
        weights, of a wrong length, or with NaN; EngineLost if the engine dies, its scheduler does not
        respond for `rollout.stall_timeout_s`, or it fails a request repeatedly. If an answer takes more
        than `rollout.request_timeout_s`, raises EngineLost if the engine is idle, and RunFailed if it
        is busy. Completions yielded before an error remain valid.
        """
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests of generate(), or all of them; their finish_reason is then `abort`."""
        ...


class RolloutEngine(EngineServer, Protocol):
    """A server with one policy. A module in mrl/engines/ provides it as a class `Engine` or a function
    `build_engine`; either takes an `EngineConfig`.

    The class may also implement `PolicyEndpoint`; `endpoint` is then the object itself.
    """

    @property
    def endpoint(self) -> PolicyEndpoint:
        """The only policy of this engine."""
        ...


class RolloutNode(Protocol):
    """An engine's process on a node other than its first. The engine's class has the attribute `Node`,
    which takes an `EngineConfig` and the node's rank. An engine without `Node` stays on one node."""

    def start(self, address: str) -> None:
        """Stop an earlier process, and begin to start one that meets the other nodes at `address`."""
        ...

    def note_ready(self) -> None:
        """Record that the engine has started on all nodes."""
        ...

    def failure(self) -> str:
        """Return why the process has ended, and where its log is; empty while it runs."""
        ...

    def stop(self) -> None:
        """End every process that start() has started. A second call does nothing."""
        ...


def sample_seed(seed: int, prompt_id: str, index: int) -> int:
    """Return the 63-bit sampling seed of sample `index` of a prompt. Equal arguments give equal seeds
    in all runs and on all machines."""
    text = f"{seed}/{index}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def engine_seed(seed: int, *counts: int) -> int:
    """Return the 31-bit seed of an engine's own random numbers: equal everywhere for equal arguments.

    `counts`, such as the engine's index, the step from which a run resumes and how often the engine was
    started, distinguish engines that need different random numbers (see `EngineConfig.seed`).
    """
    text = "/".join(str(number) for number in (seed, *counts)).encode()
    # SGLang passes it to NumPy, which takes 32 bits.
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1
